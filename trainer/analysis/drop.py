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
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, bucket_means, position_edges, prefix_lengths
from trainer.analysis.attention import (
    attention_rows,
    divergence_by_position,
    head_statistics,
)
from trainer.analysis.capture import Heads, capture
from trainer.analysis.clusters.measure import Clusters
from trainer.analysis.positional_bias.measure import positional_biases
from trainer.analysis.positional_bias.study import KINDS, STRONG
from trainer.analysis.studies.section import Grid, Part, Picture, Section, joined
from trainer.analysis.studies.study import Target
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel
from trainer.plotting.lines import Frame, Panel, Series, draw, log_if_wide, side_by_side, unscaled
from trainer.plotting.points import HeadCloud, head_points
from trainer.plotting.style import style_numbers


def head_figure(panels: Mapping[str, tuple[Array, Array]], names: Sequence[str]) -> Figure:
    """Draw ``panels``: by measure, ``[layers, heads]`` before and after."""
    layers = len(next(iter(panels.values()))[0])
    return head_points(
        [
            HeadCloud.of_layers(title, before, after, names[0], names[1], diagonal=True)
            for title, (before, after) in panels.items()
        ],
        layers,
    )


def position_figure(
    middles: Array, divergence: Array, losses: Sequence[Array], names: Sequence[str], trained: int
) -> Figure:
    """Draw means over buckets of positions with these ``middles``, in nats a token."""

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")

    vertical = (float(trained), "training length")
    curves = [
        Series(name, style_numbers(names)[name], middles.tolist(), loss.tolist(), marked=False)
        for name, loss in zip(names, losses, strict=True)
    ]
    apart = Series(
        f"KL({names[0]} ‖ {names[1]})", 0, middles.tolist(), divergence.tolist(), marked=False
    )
    kl, nats = (
        Frame("tokens read", label, prepare, vertical)
        for label in ("KL divergence (nats)", "loss (nats/token)")
    )
    return side_by_side([Panel("next-token predictions", [apart], kl), Panel("loss", curves, nats)])


def indicator_figure(
    lengths: Sequence[int],
    panels: Mapping[str, tuple[Array, Array]],
    names: Sequence[str],
    trained: int,
) -> Figure:
    """Draw ``panels``: by indicator, ``[lengths]`` before and after; the first on a log axis."""

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths[:: -(-len(lengths) // 6)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())

    def first(axes: Axes) -> None:
        log_if_wide(axes)
        prepare(axes)

    vertical = (float(trained), "training length")
    return side_by_side(
        [
            Panel(
                title,
                [
                    Series(name, style_numbers(names)[name], lengths, values.tolist())
                    for name, values in zip(names, both, strict=True)
                ],
                Frame("tokens read", "", prepare if number else first, vertical),
            )
            for number, (title, both) in enumerate(panels.items())
        ]
    )


def recovery_figure(steps: Sequence[int], losses: Sequence[float], drop_step: int) -> Figure:
    """Draw training loss by step."""
    mark = (float(drop_step), f"dropped at step {drop_step}")
    curve = Series("training loss", 1, steps, losses, marked=False)
    return draw([curve], Frame("training step", "loss (nats/token)", unscaled, mark))


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

    ``within``: number of first tokens on which heads are measured. They are read by themselves: in
    a longer text, temperatures and frequencies may differ. ``seed``: seed of the subsample for the
    silhouette score.
    """
    lengths = prefix_lengths(ids.shape[1])
    averages, clusters = Averages(), Clusters(POINTS, seed)

    def on_first_tokens(heads: Heads) -> None:
        rows = attention_rows(heads)
        averages.add(heads.layer, **head_statistics(rows), **positional_biases(rows))

    def on_layer(heads: Heads) -> None:
        sink = attention_rows(heads).sink
        averages.add(heads.layer, sink_by_length=bucket_means(sink, [1, *lengths]))
        clusters.update(heads)

    ids = ids.to(model.device)
    capture(model, ids[:, :within], on_first_tokens)
    states = capture(model, ids, on_layer)
    losses = model.losses(states[:, :-1], ids[:, 1:])
    geometry = clusters.result().rotated
    return Reading(
        {name: averages.stacked(name) for name in MEASURES},
        lengths,
        {
            "sink_mass": averages.stacked("sink_by_length").mean(axis=(0, 1)),
            "key_stable_rank": geometry.key_stable_rank.mean(axis=(0, 1)),
            "silhouette": geometry.silhouette.mean(axis=(0, 1)),
        },
        losses.double().mean(dim=0).cpu().numpy(),
    )


SMOOTH = 5
"""Number of logged losses in a mean."""


@dataclass(frozen=True)
class Recovery:
    """Recovery of the training loss after a drop (DroPE, Sec. 5), in nats a token.

    ``before`` and ``end``: means of the last five logged losses before the drop and at the end.
    ``peak``: the largest logged loss after the drop. ``back``: the first step at which the mean of
    the last five losses since the drop is at most ``before``; None if there is none.
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
    return Recovery(level, max(losses), float(np.mean(losses[-SMOOTH:])), back)


Curve = Sequence[tuple[int, float]]
INDICATORS = {
    "sink_mass": "attention on the first token",
    "key_stable_rank": "stable rank of keys",
    "silhouette": "silhouette of queries and keys",
}


class DropStudy:
    """Compare two models, read one after the other.

    ``before`` and ``after``: two targets with the same text. ``curve``: (step, training loss) of
    the run, and ``drop_step``: the last step with the encoding; give both or neither.

    Raises:
        UserError: vocabularies or texts differ, or the text has fewer than 2 tokens.
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
        if not torch.equal(before.ids.cpu(), after.ids.cpu()):
            raise UserError.at("text", "the two models must read the same tokens, got two texts.")
        if before.length < 2:
            raise UserError.at("text", f"expected 2 tokens or more, got {before.length}.")
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.curve = sorted((step, loss) for step, loss in curve or () if math.isfinite(loss))
        self.drop_step = drop_step

    @property
    def trained(self) -> int:
        """The shorter of the two training lengths."""
        return min(self.before.training_length, self.after.training_length)

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
        whole = joined(parts)
        return Section(
            self.key,
            self.title,
            f"Two models read the same text of {self.before.length} tokens, {self.names[0]} and "
            f"{self.names[1]}. Heads are compared on its first {within} tokens, within the "
            "training length: how far and how evenly they attend, how much on the first token, "
            "and how much by position alone. Predictions are compared at every position, and "
            "indicators of the geometry at prefixes of growing length. Layers and heads are "
            "counted from 0.",
            (
                "distance = mean over i of Σ_j α_ij (i − j),  "
                "entropy = mean over i of −Σ_j α_ij log α_ij / log i",
                "Aᶜ = 1/T Σᵢ Σ_{j≤i} c_ij α_ij",
                "KL(p ‖ q) = Σ_v p(v) log(p(v) / q(v)),  stable rank = ‖K‖²_F / ‖K‖²₂",
            ),
            "DroPE, Sec. 5 and Def. 3.1; RoPE-ID, Sec. 3 (sinks, stable rank, clusters).",
            whole.findings,
            whole.pictures,
            whole.grids,
            whole.numbers,
        )

    def _positions(self, before: Reading, after: Reading, divergence: Array) -> Part:
        edges = position_edges(len(before.loss), per_octave=4)
        curves = {"kl": divergence, "loss_before": before.loss, "loss_after": after.loss}
        means = {
            name: bucket_means(torch.from_numpy(curve), edges).numpy()
            for name, curve in curves.items()
        }
        middles = (np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2
        findings, inside = [], np.arange(len(before.loss)) < self.trained
        for where, among in (("within", inside), ("beyond", ~inside)):
            if not among.any():
                continue
            kl, first, second = (curve[among].mean() for curve in curves.values())
            findings.append(
                f"{where.capitalize()} the training length the loss of {self.names[0]} is "
                f"{first:.3f} and that of {self.names[1]} {second:.3f} nats a token, and their "
                f"predictions are {kl:.3f} nats apart (KL)."
            )
        picture = Picture(
            "drop_positions",
            position_figure(
                middles,
                means["kl"],
                (means["loss_before"], means["loss_after"]),
                self.names,
                self.trained,
            ),
            "By how much of the text has been read, on a logarithmic axis: how far apart the two "
            "models' predictions of the next token are, and the loss of either. Means over texts "
            "and over positions that lie close together.",
            ("from_position", "to_position", *means),
            list(zip(edges[:-1], edges[1:], *(m.tolist() for m in means.values()), strict=True)),
        )
        numbers = {name: curve.tolist() for name, curve in means.items()}
        return Part(tuple(findings), (picture,), numbers={"edges": edges} | numbers)

    def _indicators(self, before: Reading, after: Reading) -> Part:
        lengths = before.lengths
        inside = max((i for i, n in enumerate(lengths) if n <= self.trained), default=0)
        shown = dict.fromkeys((inside, len(lengths) - 1))
        both = {name: (before.indicators[name], after.indicators[name]) for name in INDICATORS}
        findings = [
            f"At {lengths[at]} tokens, from {self.names[0]} to {self.names[1]}: "
            + ", ".join(
                f"{INDICATORS[name]} {was[at]:.3f} → {now[at]:.3f}"
                for name, (was, now) in both.items()
            )
            + "."
            for at in shown
        ]
        picture = Picture(
            "drop_indicators",
            indicator_figure(
                lengths,
                {INDICATORS[name]: pair for name, pair in both.items()},
                self.names,
                self.trained,
            ),
            "Means over all heads by the length of the prefix: attention on the first token by the "
            "queries since the length before, stable rank of a head's keys and silhouette score "
            "of its queries and keys as they meet in the scores (1: two clusters apart). Right "
            "of the dashed line the models were not trained.",
            ("length", *(f"{name}_{when}" for name in both for when in ("before", "after"))),
            [
                (n, *(float(values[i]) for pair in both.values() for values in pair))
                for i, n in enumerate(lengths)
            ],
        )
        numbers = {
            name: {"before": was.tolist(), "after": now.tolist()}
            for name, (was, now) in both.items()
        }
        return Part(
            tuple(findings), (picture,), numbers={"lengths": lengths, "indicators": numbers}
        )

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
        picture = Picture(
            "drop_recovery",
            recovery_figure(steps, losses, drop_step),
            "Training loss around the drop, in nats a token: as many steps before it as there are "
            "behind.",
            ("step", "loss"),
            shown,
        )
        return Part((sentence,), (picture,), numbers={"recovery": asdict(recovered)})


SHOWN = 10
MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token, all queries",
    "diagonal": "Aᶜ, its own token",
    "previous": "Aᶜ, the previous token",
}
Names = tuple[str, str]
ByMeasure = Mapping[str, Array]


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
    order = np.argsort(-change, axis=None, kind="stable")
    ranked = [tuple(map(int, np.unravel_index(i, change.shape))) for i in order]
    rows = [
        (*at, *(float(of[name][at]) for name in MEASURES for of in (was, now)))
        for at in np.ndindex(change.shape)
    ]
    header = (
        "layer",
        "head",
        *(f"{name}_{when}" for name in MEASURES for when in ("before", "after")),
    )
    table = Grid(
        f"The {min(SHOWN, change.size)} heads that changed most, {names[0]} → "
        f"{names[1]}. The order is by the changes in all columns together, each over its "
        "root mean square among heads.",
        ("layer", "head", *MEASURES.values()),
        [
            (*at, *(f"{was[name][at]:.3g} → {now[name][at]:.3g}" for name in MEASURES))
            for at in ranked[:SHOWN]
        ],
    )
    pictures = tuple(
        Picture(
            f"drop_{name}",
            head_figure(
                {MEASURES[measure]: (was[measure], now[measure]) for measure in measures},
                names,
            ),
            f"{what} of every head in {names[0]} (x) and in {names[1]} (y), coloured "
            "by layer. Heads on the dotted line did not change.",
            header,
            rows,
        )
        for name, what, measures in (
            ("positional_heads", "Positional bias Aᶜ", tuple(KINDS)),
            ("attention", "Attention", ("distance", "entropy", "sink_mass")),
        )
    )
    findings = [_most_changed(was, now, ranked[0])]
    findings += [_positional(kind, was[kind], now[kind], names) for kind in KINDS]
    numbers = {
        name: {"before": was[name].tolist(), "after": now[name].tolist()} for name in MEASURES
    }
    return Part(tuple(findings), pictures, (table,), {"heads": numbers})


def _most_changed(was: ByMeasure, now: ByMeasure, at: tuple[int, ...]) -> str:
    return (
        f"Layer {at[0]} head {at[1]} changed most: its mean distance goes from "
        f"{was['distance'][at]:.1f} to {now['distance'][at]:.1f} tokens and the attention "
        f"of all its queries on the first token from {100 * was['sink_mass'][at]:.1f}% to "
        f"{100 * now['sink_mass'][at]:.1f}%. Over all heads the mean distance goes from "
        f"{was['distance'].mean():.1f} to {now['distance'].mean():.1f} tokens and the entropy "
        f"from {was['entropy'].mean():.2f} to {now['entropy'].mean():.2f}."
    )


def _positional(kind: str, was: Array, now: Array, names: Names) -> str:
    had, has = was >= STRONG, now >= STRONG
    at = np.unravel_index(was.argmax(), was.shape)
    kept, gained = int((had & has).sum()), int((has & ~had).sum())
    strong = f"Aᶜ ≥ {STRONG} towards {KINDS[kind]}"
    if had.any():
        count = (
            f"{had.sum()} {'head' if had.sum() == 1 else 'heads'} of {names[0]} "
            f"{'has' if had.sum() == 1 else 'have'} {strong}; {kept} of them still "
            f"{'has' if kept == 1 else 'have'} it in {names[1]}, and {gained} gained it."
        )
    else:
        count = f"No head of {names[0]} has {strong}; {gained} gained it in {names[1]}."
    return (
        f"{count} The strongest, layer {at[0]} head {at[1]}, goes from {was[at]:.3f} to "
        f"{now[at]:.3f}."
    )
