"""The comparison of two models on one text: RoPE before the drop and DroPE after it, or any two
others (DroPE).

Models are read layer by layer, and only means are kept. Heads are compared within the shorter
training length; predictions and indicators also beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from torch import Tensor

from trainer.analysis.arrays import (
    Array,
    Averages,
    Place,
    bucket_means,
    position_edges,
    prefix_lengths,
    ranked,
)
from trainer.analysis.attention import attention_rows, head_statistics
from trainer.analysis.capture import Heads, capture, separate_prefix
from trainer.analysis.clusters.measure import Clusters
from trainer.analysis.positional_bias.measure import positional_biases
from trainer.analysis.positional_bias.study import KINDS, STRONG
from trainer.analysis.studies.section import (
    Grid,
    Part,
    Picture,
    Section,
    column_rows,
    joined,
    last_within,
    wide_rows,
)
from trainer.analysis.studies.study import Target
from trainer.common.errors import UserError
from trainer.common.words import counted
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size
from trainer.plotting.lines import Frame, Panel, Series, draw, log_if_wide, side_by_side, unscaled
from trainer.plotting.points import HeadCloud, head_points
from trainer.plotting.style import style_numbers

MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token, all queries",
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
SHOWN = 10
Names = tuple[str, str]
ByMeasure = Mapping[str, Array]


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


Curve = Sequence[tuple[int, float]]


class DropStudy:
    """Compare two models, read one after the other, within the shorter training length ``trained``
    and beyond it.

    ``before`` and ``after``: two targets with the same text. ``curve``: (step, training loss) of
    the run, and ``drop_step``: the last step with the encoding; give both or neither.

    Raises:
        UserError: vocabularies differ, or the text has fewer than 2 tokens.
    """

    key: ClassVar[str] = "drop"
    title: ClassVar[str] = "Before and after the drop"

    def __init__(
        self,
        before: Target,
        after: Target,
        curve: Curve | None = None,
        drop_step: int | None = None,
    ) -> None:
        sizes = [target.model.config.vocab_size for target in (before, after)]
        if sizes[0] != sizes[1]:
            raise UserError.at(
                "model",
                f"the two models must share a vocabulary, got {sizes[0]} and {sizes[1]} tokens.",
            )
        if before.length < 2:
            raise UserError.at("text", f"expected 2 tokens or more, got {before.length}.")
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.trained = min(before.training_length, after.training_length)
        same = before.training_length == after.training_length
        self._length = "the training length" if same else "the shorter training length"
        self._mark = (float(self.trained), self._length.removeprefix("the "))
        self.curve = sorted((step, loss) for step, loss in curve or () if math.isfinite(loss))
        self.drop_step = drop_step

    def run(self) -> Section:
        """Read the text with both models and write the section."""
        within = min(self.trained, self.before.length)
        before, after = (
            read(target.model, target.ids, within=within, seed=target.seed)
            for target in (self.before, self.after)
        )
        divergence = divergence_by_position(self.before.model, self.after.model, self.before.ids)
        parts = [
            heads_part(before.heads, after.heads, self.names),
            self._positions(before, after, divergence[:-1]),
            self._indicators(before, after),
        ]
        if self.drop_step is not None and (recovery := self._recovery(self.drop_step)):
            parts.append(recovery)
        return Section(
            key=self.key,
            title=self.title,
            text=(
                f"Two models read the same text of {self.before.length} tokens, {self.names[0]} "
                f"and {self.names[1]}. Heads are compared on its first {within} tokens, within "
                f"{self._length}: how far and how evenly they attend, how much on the first token, "
                "and how much by position alone. Predictions are compared at every position, and "
                "indicators of the geometry at prefixes of growing length. Layers and heads are "
                "counted from 0."
            ),
            formula=(
                "distance = mean over i of Σ_j α_ij (i − j),  "
                "entropy = mean over i of −Σ_j α_ij log α_ij / log i",
                "Aᶜ = 1/T Σᵢ Σ_{j≤i} c_ij α_ij",
                "KL(p ‖ q) = Σ_v p(v) log(p(v) / q(v)),  stable rank = ‖K‖²_F / ‖K‖²₂",
            ),
            source="DroPE, Sec. 5 and Def. 3.1; RoPE-ID, Sec. 3 (sinks, stable rank, clusters).",
            **vars(joined(parts)),
        )

    def _lines(
        self, x: Sequence[float], curves: tuple[Array, Array], *, marked: bool = True
    ) -> list[Series]:
        """Return a line for each model."""
        styles = style_numbers(self.names)
        return [
            Series(name, styles[name], x, curve.tolist(), marked=marked)
            for name, curve in zip(self.names, curves, strict=True)
        ]

    def _positions(self, before: Reading, after: Reading, divergence: Array) -> Part:
        edges = position_edges(len(before.loss), per_octave=4)
        curves = {"kl": divergence, "loss_before": before.loss, "loss_after": after.loss}
        means = {
            name: bucket_means(torch.from_numpy(curve), edges).numpy()
            for name, curve in curves.items()
        }
        middles = ((np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2).tolist()
        findings, inside = [], np.arange(len(before.loss)) < self.trained
        for where, among in (("Within", inside), ("Beyond", ~inside)):
            if not among.any():
                continue
            kl, first, second = (curve[among].mean() for curve in curves.values())
            findings.append(
                f"{where} {self._length} the loss of {self.names[0]} is {first:.3f} and the "
                f"loss of {self.names[1]} {second:.3f} nats a token, and their predictions are "
                f"{kl:.3f} nats apart (KL)."
            )

        label = f"KL({self.names[0]} ‖ {self.names[1]})"
        apart = Series(label, 0, middles, means["kl"].tolist(), marked=False)
        losses = self._lines(middles, (means["loss_before"], means["loss_after"]), marked=False)
        panels = [
            Panel(title, lines, Frame("tokens read", y_label, _log_tokens, self._mark))
            for title, lines, y_label in (
                ("next-token predictions", [apart], "KL divergence (nats)"),
                ("loss", losses, "loss (nats/token)"),
            )
        ]
        picture = Picture(
            name="drop_positions",
            figure=side_by_side(panels),
            caption=(
                "Distance between the two models' predictions of the next token, and the loss of "
                "each, by the number of tokens read (logarithmic). Means over texts and over "
                "positions that lie close together."
            ),
            header=("from_position", "to_position", *means),
            rows=column_rows(map(np.array, (edges[:-1], edges[1:], *means.values()))),
        )
        return Part(tuple(findings), (picture,), numbers={"edges": edges, **means})

    def _indicators(self, before: Reading, after: Reading) -> Part:
        lengths = before.lengths
        shown = dict.fromkeys((last_within(lengths, self.trained), len(lengths) - 1))
        both = {name: (before.indicators[name], after.indicators[name]) for name in INDICATORS}
        columns = _columns(both)
        findings = [
            f"At {lengths[i]} tokens, from {self.names[0]} to {self.names[1]}: "
            + ", ".join(
                f"{INDICATORS[name]} {was[i]:.3f} → {now[i]:.3f}"
                for name, (was, now) in both.items()
            )
            + "."
            for i in shown
        ]

        def prepare(axes: Axes) -> None:
            _log_tokens(axes)
            axes.set_xticks(lengths[:: -(-len(lengths) // 6)])
            axes.xaxis.set_minor_locator(NullLocator())

        def prepare_first(axes: Axes) -> None:
            log_if_wide(axes)
            prepare(axes)

        panels = [
            Panel(
                INDICATORS[name],
                self._lines(lengths, curves),
                Frame("tokens read", "", prepare if number else prepare_first, self._mark),
            )
            for number, (name, curves) in enumerate(both.items())
        ]
        picture = Picture(
            name="drop_indicators",
            figure=side_by_side(panels),
            caption=(
                "Means over all heads by the length of the prefix: attention on the first token by "
                "the queries since the length before, stable rank of a head's keys and silhouette "
                "score of its queries and keys as they meet in the scores (1: two clusters apart). "
                f"Dashed: {self._length}."
            ),
            header=("length", *columns),
            rows=column_rows([np.array(lengths), *columns.values()]),
        )
        numbers = {"lengths": lengths, "indicators": _numbers(both)}
        return Part(tuple(findings), (picture,), numbers=numbers)

    def _recovery(self, drop_step: int) -> Part | None:
        recovered = recovery(self.curve, drop_step)
        if recovered is None:
            return None
        rises = "rises to" if recovered.peak > recovered.before else "is at most"
        sentence = (
            f"Before the drop the training loss is {recovered.before:.3f}; after it, it {rises} "
            f"{recovered.peak:.3f} and "
        )
        if recovered.back is None or recovered.peak <= recovered.before:
            apart = recovered.end - recovered.before
            sentence += f"ends {abs(apart):.3f} nats {'above' if apart > 0 else 'below'}."
        else:
            sentence += (
                f"is back {recovered.back - drop_step} steps later; it ends at {recovered.end:.3f}."
            )
        span = self.curve[-1][0] - drop_step
        shown = [(step, loss) for step, loss in self.curve if step >= drop_step - span]
        steps, losses = map(list, zip(*shown, strict=True))
        mark = (float(drop_step), f"dropped at step {drop_step}")
        line = Series("training loss", 1, steps, losses, marked=False)
        picture = Picture(
            name="drop_recovery",
            figure=draw([line], Frame("training step", "loss (nats/token)", unscaled, mark)),
            caption=(
                "Training loss before and after the drop, in nats a token, over the same number of "
                "steps."
            ),
            header=("step", "loss"),
            rows=shown,
        )
        return Part((sentence,), (picture,), numbers={"recovery": asdict(recovered)})


def _log_tokens(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _columns(both: Mapping[str, tuple[Array, Array]]) -> dict[str, Array]:
    return {
        f"{name}_{when}": values
        for name, pair in both.items()
        for when, values in zip(("before", "after"), pair, strict=True)
    }


def _numbers(both: Mapping[str, tuple[Array, Array]]) -> dict[str, dict[str, Array]]:
    return {name: {"before": was, "after": now} for name, (was, now) in both.items()}


def head_change(was: ByMeasure, now: ByMeasure) -> Array:
    """Combine a head's changes in all measures, each over its root mean square among heads."""
    changes = np.stack([now[name] - was[name] for name in MEASURES])
    usual = np.sqrt(np.square(changes).mean(axis=(1, 2), keepdims=True))
    return np.sqrt(np.square(changes / np.where(usual > 0, usual, 1.0)).sum(axis=0))


def heads_part(was: ByMeasure, now: ByMeasure, names: Names) -> Part:
    """Compare :data:`MEASURES` of every head ``[layers, heads]`` of two models with these names."""
    if was["distance"].shape != now["distance"].shape:
        shapes = [f"{x['distance'].shape[0]} x {x['distance'].shape[1]}" for x in (was, now)]
        sizes = " and ".join(shapes)
        return Part((f"Heads were not compared: the models have {sizes} layers and heads.",))
    change = head_change(was, now)
    order = ranked(-change)
    both = {name: (was[name], now[name]) for name in MEASURES}
    columns = _columns(both)
    table = Grid(
        caption=(
            f"The {min(SHOWN, change.size)} heads that changed most, {names[0]} → "
            f"{names[1]}. The order is by the changes in all columns together, each over its "
            "root mean square among heads."
        ),
        header=("layer", "head", *MEASURES.values()),
        rows=[
            (*place, *(f"{old[place]:.3g} → {new[place]:.3g}" for old, new in both.values()))
            for place in order[:SHOWN]
        ],
    )
    pictures = tuple(
        Picture(
            name=f"drop_{name}",
            figure=head_points(
                [
                    HeadCloud.of_layers(*both[measure], *names, MEASURES[measure], diagonal=True)
                    for measure in measures
                ],
                len(change),
            ),
            caption=(
                f"{title} of every head in {names[0]} (x) and in {names[1]} (y), coloured "
                "by layer. Heads on the dotted line did not change."
            ),
            header=("layer", "head", *columns),
            rows=wide_rows(list(columns.values())),
        )
        for name, title, measures in (
            ("positional_heads", "Positional bias Aᶜ", tuple(KINDS)),
            ("attention", "Attention", ("distance", "entropy", "sink_mass")),
        )
    )
    findings = [_most_changed(was, now, order[0])]
    findings += [_positional(kind, was[kind], now[kind], names) for kind in KINDS]
    return Part(tuple(findings), pictures, (table,), {"heads": _numbers(both)})


def _most_changed(was: ByMeasure, now: ByMeasure, place: Place) -> str:
    layer, head = place
    return (
        f"Layer {layer} head {head} changed most: its mean distance goes from "
        f"{was['distance'][place]:.1f} to {now['distance'][place]:.1f} tokens and the attention "
        f"of all its queries on the first token from {100 * was['sink_mass'][place]:.1f}% to "
        f"{100 * now['sink_mass'][place]:.1f}%. Over all heads the mean distance goes from "
        f"{was['distance'].mean():.1f} to {now['distance'].mean():.1f} tokens and the entropy "
        f"from {was['entropy'].mean():.2f} to {now['entropy'].mean():.2f}."
    )


def _positional(kind: str, was: Array, now: Array, names: Names) -> str:
    before, after = was >= STRONG, now >= STRONG
    (layer, head), *_ = ranked(-was)
    stay, gained = int((before & after).sum()), int((after & ~before).sum())
    strong = f"Aᶜ ≥ {STRONG} towards {KINDS[kind]}"
    if before.any():
        count = (
            f"{counted(int(before.sum()), 'head')} of {names[0]} "
            f"{'has' if before.sum() == 1 else 'have'} {strong}; {stay} of them still "
            f"{'has' if stay == 1 else 'have'} it in {names[1]}, and {gained} gained it."
        )
    else:
        count = f"No head of {names[0]} has {strong}; {gained} gained it in {names[1]}."
    return (
        f"{count} The strongest, layer {layer} head {head}, goes from {was[layer, head]:.3f} to "
        f"{now[layer, head]:.3f}."
    )
