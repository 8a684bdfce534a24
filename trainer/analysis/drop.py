"""The comparison of two models on one text: RoPE before the drop and DroPE after it, or any two
others (DroPE).

Models are read layer by layer, and only means are kept. Heads are compared within the shorter
training length; predictions and indicators also beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, bucket_means, position_edges, prefix_lengths
from trainer.analysis.attention import attention_rows, head_statistics
from trainer.analysis.capture import Heads, capture, separate_prefix
from trainer.analysis.clusters import Clusters
from trainer.analysis.positional_bias import positional_biases
from trainer.analysis.topic import Plot, Results, Target, finished, tidy
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size
from trainer.plotting.lines import (
    Frame,
    Panel,
    Series,
    log_if_wide,
    log_lengths,
    side_by_side,
)
from trainer.plotting.points import Points, diagonal, points
from trainer.plotting.style import style_numbers

MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token",
    "diagonal": "Aᶜ, its own token",
    "previous": "Aᶜ, the previous token",
}
INDICATORS = {
    "sink_mass": "attention on the first token",
    "key_stable_rank": "stable rank of keys",
    "silhouette": "silhouette of queries and keys",
}
POINTS = 256
"""Number of queries and of keys in the sample for the silhouette score."""


@dataclass(frozen=True)
class Reading:
    """Statistics of one model on the text.

    ``heads``: by name, ``[layers, query heads]`` over the first tokens: ``distance``, ``entropy``,
    ``sink_mass``, and the positional bias ``diagonal`` and ``previous``. ``indicators``: by name,
    means over heads at each of ``lengths``: ``sink_mass`` of the queries since the length before,
    ``key_stable_rank`` and ``silhouette`` of encoded queries and keys. ``loss``: ``[T - 1]`` nats.
    """

    heads: dict[str, Array]
    lengths: list[int]
    indicators: dict[str, Array]
    loss: Array


@torch.no_grad()
def read(model: LanguageModel, ids: Tensor, *, within: int, seed: int = 0) -> Reading:
    """Read ``ids`` ``[B, T]``, of at least two tokens, layer by layer.

    ``within``: number of first tokens on which heads are measured. They are read without the later
    tokens, for the indicators too, if temperatures or frequencies follow the length. ``seed``: seed
    of the subsample for the silhouette score.
    """
    lengths = prefix_lengths(ids.shape[1])
    inside = [n for n in lengths if n <= within]
    averages, clusters = Averages(), Clusters(POINTS, seed)
    ids = ids.to(model.device)
    prefix = separate_prefix(model, ids, within)

    def measure_heads(heads: Heads) -> Tensor:
        rows = attention_rows(heads)
        averages.add(heads.layer, **head_statistics(rows), **positional_biases(rows))
        return rows.sink

    def on_layer(heads: Heads) -> None:
        sink = attention_rows(heads).sink
        averages.add(heads.layer, sink_by_length=bucket_means(sink, [1, *lengths]))
        clusters.update(heads)
        if prefix is None:
            measure_heads(heads.first(within))

    def on_prefix(heads: Heads) -> None:
        sink = measure_heads(heads)
        averages.add(heads.layer, sink_inside=bucket_means(sink, [1, *inside]))
        clusters.update_prefix(heads)

    states = capture(model, ids, on_layer)
    losses = model.losses(states[:, :-1], ids[:, 1:])
    sinks = averages.stacked("sink_by_length")
    if prefix is not None:
        capture(model, prefix, on_prefix)
        sinks[..., : len(inside)] = averages.stacked("sink_inside")
    geometry = clusters.result()
    return Reading(
        heads={name: averages.stacked(name) for name in MEASURES},
        lengths=lengths,
        indicators={
            "sink_mass": sinks.mean(axis=(0, 1)),
            "key_stable_rank": geometry["rotated.key_stable_rank"].mean(axis=(0, 1)),
            "silhouette": geometry["rotated.silhouette"].mean(axis=(0, 1)),
        },
        loss=losses.double().mean(dim=0).cpu().numpy(),
    )


@torch.no_grad()
def divergence_by_position(model: LanguageModel, other: LanguageModel, ids: Tensor) -> Array:
    """Compute KL(model || other) of the next token at every position, ``[T]`` nats, averaged over
    the texts ``ids`` ``[B, T]``; both models share a vocabulary."""

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = (logits.float().log_softmax(dim=-1) for logits in (p, q.to(p.device)))
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1, dtype=torch.float64).clamp(min=0)

    states = [m.hidden_states(ids.to(m.device)).flatten(0, 1) for m in (model, other)]
    size = chunk_size(model.vocab_size, model.device)
    chunks = [
        divergence(model.logits(p), other.logits(q))
        for p, q in zip(*(x.split(size) for x in states), strict=True)
    ]
    return torch.cat(chunks).view(ids.shape).mean(dim=0).cpu().numpy()


SMOOTH = 5
"""Number of logged losses in a mean."""


@dataclass(frozen=True)
class Recovery:
    """Recovery of the training loss after a drop (DroPE, Sec. 5), in nats a token.

    ``before`` and ``end``: means of the last five logged losses before the drop and at the end.
    ``peak``: the largest logged loss after the drop. ``back``: the first step at which the mean of
    the last five losses since the drop is at most ``before``; None if no step is.
    """

    before: float
    peak: float
    end: float
    back: int | None


def recovery(curve: Sequence[tuple[int, float]], drop_step: int) -> Recovery | None:
    """Measure the recovery of a ``curve`` of (step, loss) after ``drop_step``, the last step before
    the drop; return None if the curve has no loss before the drop or none after it."""
    before = [loss for step, loss in curve if step <= drop_step]
    after = [(step, loss) for step, loss in curve if step > drop_step]
    if not before or not after:
        return None
    level = float(np.mean(before[-SMOOTH:]))
    losses = [loss for _, loss in after]
    means = [float(np.mean(losses[max(0, i - SMOOTH) : i])) for i in range(SMOOTH, len(losses) + 1)]
    steps = [step for step, _ in after][SMOOTH - 1 :]
    back = next((step for step, mean in zip(steps, means, strict=True) if mean <= level), None)
    return Recovery(before=level, peak=max(losses), end=float(np.mean(losses[-SMOOTH:])), back=back)


class DropComparison:
    """Compare two models, read one after the other, within the shorter training length ``trained``
    and beyond it.

    ``before`` and ``after``: two targets with the same text. ``curve``: (step, training loss) of
    the run, and ``drop_step``: the last step with the encoding; give both or neither.

    Raises:
        UserError: vocabularies differ, or the text has fewer than 2 tokens.
    """

    key = "drop"
    title = "Before and after the drop"

    def __init__(
        self,
        before: Target,
        after: Target,
        curve: Sequence[tuple[int, float]] = (),
        drop_step: int | None = None,
    ) -> None:
        sizes = [target.model.config.vocab_size for target in (before, after)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"compare: expected models of one vocabulary, got {sizes[0]} and {sizes[1]} tokens"
            )
        if before.length < 2:
            raise UserError(f"analysis.length: expected 2 tokens or more, got {before.length}")
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.trained = min(before.training_length, after.training_length)
        self.curve = sorted((step, loss) for step, loss in curve if math.isfinite(loss))
        self.drop_step = drop_step

    def results(self) -> Results:
        """Read the text with both models; draw heads, predictions and indicators of both."""
        within = min(self.trained, self.before.length)
        before, after = (
            read(target.model, target.ids, within=within, seed=target.seed)
            for target in (self.before, self.after)
        )
        divergence = divergence_by_position(self.before.model, self.after.model, self.before.ids)
        edges = position_edges(len(before.loss), per_octave=4)
        means = {
            name: bucket_means(torch.from_numpy(curve), edges).numpy()
            for name, curve in (
                ("kl", divergence[:-1]),
                ("before", before.loss),
                ("after", after.loss),
            )
        }
        plots = self._heads(before, after)
        plots += [self._positions(edges, means), self._indicators(before, after)]
        tables = [
            tidy(reading.heads, "layer", "head", length=within, model=name)
            for name, reading in zip(self.names, (before, after), strict=True)
        ]
        for name, reading in zip(self.names, (before, after), strict=True):
            for metric, values in reading.indicators.items():
                places = {"length": reading.lengths}
                table = tidy({f"mean_{metric}": values}, "length", places=places, model=name)
                tables.append(table)
        for metric, name, key in (
            ("loss", self.names[0], "before"),
            ("loss", self.names[1], "after"),
            ("kl", " ‖ ".join(self.names), "kl"),
        ):
            table = tidy({metric: means[key]}, "length", places={"length": edges[1:]}, model=name)
            tables.append(table)
        recovered = None if self.drop_step is None else recovery(self.curve, self.drop_step)
        if recovered is not None and self.drop_step is not None:
            plots.append(self._recovery(self.drop_step))
            numbers = {f"training_loss_{k}": v for k, v in asdict(recovered).items()}
            back = numbers.pop("training_loss_back")
            numbers["steps_until_back"] = math.nan if back is None else back - self.drop_step
            tables.append(tidy(numbers, model=self.names[1]))
        return finished(self, plots, pd.concat(tables), self.names[1])

    def _heads(self, before: Reading, after: Reading) -> list[Plot]:
        """Draw every head of both models; empty if they have different numbers of them."""
        shape = before.heads["distance"].shape
        if shape != after.heads["distance"].shape:
            return []
        layer = np.indices(shape)[0]
        plots = []
        for name, measures, source in (
            ("positional_heads", ("diagonal", "previous"), "Def. 3.1"),
            ("attention", ("distance", "entropy", "sink_mass"), "Sec. 5"),
        ):
            panels = [
                Points.graded(
                    MEASURES[m],
                    *(before.heads[m], after.heads[m], layer),
                    Frame(self.names[0], "" if i else self.names[1], diagonal),
                )
                for i, m in enumerate(measures)
            ]
            caption = (
                f"Every head in {self.names[0]} (x) and {self.names[1]} (y) (DroPE, {source})."
            )
            figure = points(panels, size=14, index="layer")
            plots.append(Plot(f"drop_{name}", figure, caption))
        return plots

    def _lines(
        self, x: Sequence[float], curves: tuple[Array, Array], *, marked: bool = True
    ) -> list[Series]:
        """Return a line for each model."""
        styles = style_numbers(self.names)
        return [
            Series(name, styles[name], x, curve.tolist(), marked=marked)
            for name, curve in zip(self.names, curves, strict=True)
        ]

    @property
    def _mark(self) -> tuple[float, str]:
        return float(self.trained), "training length"

    def _positions(self, edges: Sequence[int], means: dict[str, Array]) -> Plot:
        middles = ((np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2).tolist()
        label = f"KL({self.names[0]} ‖ {self.names[1]})"
        apart = Series(label, 0, middles, means["kl"].tolist(), marked=False)
        losses = self._lines(middles, (means["before"], means["after"]), marked=False)
        panels = [
            Panel(title, lines, Frame("tokens read", y_label, log_lengths, self._mark))
            for title, lines, y_label in (
                ("next-token predictions", [apart], "KL divergence (nats)"),
                ("loss", losses, "loss (nats/token)"),
            )
        ]
        return Plot(
            "drop_positions",
            side_by_side(panels),
            "Distance between both models' predictions, and their losses, by the number of tokens "
            "read (DroPE, Sec. 5).",
        )

    def _indicators(self, before: Reading, after: Reading) -> Plot:
        def prepare(axes: Axes) -> None:
            log_if_wide(axes)
            log_lengths(axes)

        panels = [
            Panel(
                title,
                self._lines(before.lengths, (before.indicators[name], after.indicators[name])),
                Frame("tokens read", "", log_lengths if number else prepare, self._mark),
            )
            for number, (name, title) in enumerate(INDICATORS.items())
        ]
        return Plot(
            "drop_indicators",
            side_by_side(panels),
            "Means over all heads by the length of the prefix, as queries and keys meet (RoPE-ID, "
            "Sec. 3).",
        )

    def _recovery(self, drop_step: int) -> Plot:
        """Draw the training loss over as many steps before the drop as after it."""
        span = self.curve[-1][0] - drop_step
        shown = [(step, loss) for step, loss in self.curve if step >= drop_step - span]
        steps, losses = map(list, zip(*shown, strict=True))
        mark = (float(drop_step), f"dropped at step {drop_step}")
        line = Series("training loss", 1, steps, losses, marked=False)
        frame = Frame("training step", "loss (nats/token)", vertical=mark)
        return Plot(
            "drop_recovery",
            side_by_side([Panel("", [line], frame)]),
            "Training loss before and after the drop (DroPE, Sec. 5).",
        )
