"""The first token as an attention sink: its short key, the attention on it, and how both change in
long texts (RoPE-ID Sec. 3.2, App. A.2; Fig. 5, 6 and 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, Place, bucket_means, position_edges, to_json
from trainer.analysis.attention import Rows, attention_rows, head_attention
from trainer.analysis.capture import Heads
from trainer.analysis.studies.section import Indicator, Picture, Section, long_rows
from trainer.analysis.studies.study import Study, Target, Versions, before, extremes, versions
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, over_heads
from trainer.plotting.maps import Scale, heat_maps

HALF, SINK = 0.5, 4
CELLS = 128
MEASURES = ("key_dot", "sink_weight", "peak")
"""Measures with and without the encoding: the mean dot product of a key with its own query and all
later ones, by the key's position; attention on the first key, and the largest dot product with a
key, both by the query's position, which is the length of the text so far."""
FROM_STATES = ("previous", "entropy")
"""Attention on the token before and entropy, each divided by its value in uniform attention."""
HEADER = ("version", "measure", "from_position", "to_position", "mean", "low", "high")


def key_dot(q: Tensor, k: Tensor) -> Tensor:
    """Compute the mean of q_i k_j over i >= j, ``[B, Hq, T]``: each key times the mean of its
    queries."""
    T = q.shape[2]
    later = q.double().flip(2).cumsum(dim=2).flip(2)
    later /= torch.arange(T, 0, -1, device=q.device)[:, None]
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (later * shared).sum(dim=-1)


def attention_map(heads: Heads, head: int, *, size: int) -> Array:
    """Reduce a head's attention on the first text to a map of at most ``size`` cells a side.

    A cell covers ``ceil(T / size)`` queries and as many keys: it sums attention over its keys and
    averages over its queries. Every row sums to 1, less the weight of a learned sink.
    """
    T = heads.q.shape[2]
    cell = -(-T // size)
    names = ("q", "k", "rotated_q", "rotated_k")
    first = replace(heads, **{name: getattr(heads, name)[:1] for name in names})
    rows = []
    step = cell * max(1, 256 // cell)
    cells = -(-T // cell)
    for start in range(0, T, step):
        stop = min(start + step, T)
        attention = head_attention(first, head, slice(start, stop))[0]
        keys = F.pad(attention, (0, cells * cell - stop)).unflatten(-1, (cells, cell)).sum(dim=-1)
        rows += [part.mean(dim=0) for part in keys.split(cell)]
    return torch.stack(rows).cpu().numpy()


MAP_HEADER = ("layer", "head", "from_query", "from_key", "attention")


def draw_attention_maps(
    maps: Mapping[Place, Array],
    titles: Sequence[str],
    step: int,
    *,
    low: float,
    **layout: Any,
) -> tuple[Figure, list[tuple[Any, ...]]]:
    """Draw maps of attention by layer and head, and return the numbers of their lower triangles.

    ``step``: tokens of a cell. ``low``: attention of the darkest colour. ``layout``: options of
    :func:`heat_maps`.
    """
    scale = Scale("attention of a query on a cell", low=low, high=1, log=True)
    visible = [np.where(cells > 0, cells, np.nan) for cells in maps.values()]
    figure = heat_maps(
        dict(zip(titles, visible, strict=True)),
        scale,
        x="key (tokens)",
        y="query (tokens)",
        cell=(step, step),
        **layout,
    )
    rows = [
        (*place, int(i) * step, int(j) * step, float(cells[i, j]))
        for place, cells in maps.items()
        for i, j in zip(*np.tril_indices(len(cells)), strict=True)
    ]
    return figure, rows


class SinksStudy(Study):
    """Norms of keys, attention on the first key, and the largest dot products, by position.

    ``curves``: means within buckets of positions, ``[layers, heads, buckets]``, by name; bucket b
    holds positions ``edges[b]`` to ``edges[b + 1] - 1``. ``median_key_norm``: ``[layers, heads]``.
    """

    key: ClassVar[str] = "sinks"
    title: ClassVar[str] = "Attention sinks"
    shortest: ClassVar[int] = 8  # other positions than the first

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.versions = versions(target, scores=True)
        self.edges = position_edges(target.length)
        if target.prefix is not None:  # no bucket holds positions of both passes
            self.edges = sorted({*self.edges, target.training_length})
        self.curves: dict[str, Array] = {}
        self._averages = Averages()
        self._prefix = Averages()
        self._maps: dict[Place, Array] = {}
        self._shares: dict[Place, float] = {}  # of the heads' attention on the first token

    def _bucketed(self, heads: Heads) -> tuple[dict[str, Tensor], Rows]:
        """Read every row of attention with the encoding and, if it changes attention, without."""
        rotated = attention_rows(heads)
        plain = rotated if _is_bare(heads) else attention_rows(heads, rotated=False)
        # A query that sees one key has entropy 0; log 2 avoids 0 / 0.
        largest = rotated.visible.clamp(min=2).log()
        values = {
            "key_norm": heads.k.norm(dim=-1),
            "previous": rotated.previous * rotated.visible,
            "entropy": rotated.entropy / largest,
        }
        for version, rows, q, k in (
            ("plain", plain, heads.q, heads.k),
            ("rotated", rotated, heads.rotated_q, heads.rotated_k),
        ):
            measured = (key_dot(q, k), rows.sink, rows.peak)
            names = (f"{version}.{measure}" for measure in MEASURES)
            values |= dict(zip(names, measured, strict=True))
        if heads.sinks is not None:
            values["learned_sink"] = rotated.learned
        edges = [edge for edge in self.edges if edge <= heads.q.shape[2]]
        return {name: bucket_means(value, edges) for name, value in values.items()}, rotated

    def on_layer(self, heads: Heads) -> None:
        """Measure all heads, and map the attention of those that may be shown."""
        bucketed, rotated = self._bucketed(heads)
        norms = heads.k.norm(dim=-1)
        median = norms[..., 1:].median(dim=-1).values
        self._averages.add(heads.layer, **bucketed, median_key_norm=median)
        for head in self._pictured(heads, rotated):
            self._maps[heads.layer, head] = attention_map(heads, head, size=CELLS)
            self._shares[heads.layer, head] = float(rotated.sink[0, head, 1:].mean())

    def on_prefix(self, heads: Heads) -> None:
        """Measure what depends on the query's position within the training length."""
        bucketed, _ = self._bucketed(heads)
        of_queries = {
            name: value
            for name, value in bucketed.items()
            if name != "key_norm" and not name.endswith("key_dot")
        }
        self._prefix.add(heads.layer, **of_queries)

    def _pictured(self, heads: Heads, rows: Rows) -> list[int]:
        if self.target.chosen:
            return [head for layer, head in self.target.chosen if layer == heads.layer]
        if heads.layer not in self.target.sampled_layers:
            return []
        order = rows.sink[0, :, 1:].mean(dim=-1).argsort().tolist()
        return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))

    def section(self) -> Section:
        """Write the section: curves by position, a map of heads, attention of some heads."""
        self.curves = self._averages.all_stacked()
        for name, within in self._prefix.all_stacked().items():
            self.curves[name][..., : within.shape[-1]] = within
        pictures = [self._collapse(), self._keys(), self._heads()]
        if self._maps:
            pictures.append(self._attention())
        if "plain" not in self.versions:
            pictures.append(self._without_rotation())
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "Softmax must put its weight somewhere. A head that has nothing to retrieve puts "
                "it on a placeholder, mostly the first token, whose key is short: if queries and "
                "keys lie on opposite sides of the origin, a key near the origin has the largest "
                f"dot product. {'When the rotation of' if self.target.rotates else 'Where'} a long "
                "text spreads the clouds, other keys get large dot products by accident and the "
                "sink loses its weight. The text begins with a beginning-of-text token and holds "
                "no other separator, because each would be another sink. Positions are counted "
                "from 1."
            ),
            formula=(
                "attention on the first key = α_{i1} = softmax_j(⟨q_i, k_j⟩ / √d)₁",
                "dot product of key j = mean over i ≥ j of ⟨q_i, k_j⟩",
                "largest dot product of query i = max over j ≤ i of ⟨q_i, k_j⟩",
            ),
            source="RoPE-ID (Frayed RoPE and Long Inputs), Sec. 3.2, App. A.2; Fig. 5, 6, 9.",
            findings=tuple(self._findings()),
            pictures=tuple(pictures),
            numbers=self._numbers(),
        )

    def _near(self, name: str, length: int) -> Array:
        """Return ``[layers, heads]`` of a curve near a length."""
        return mean_at(self.curves[name], self.edges, length)

    def _means_near(self, name: str, form: str) -> str:
        """Return the means over heads near each of the places that the findings quote."""
        return " → ".join(format(self._near(name, n).mean(), form) for n in self._places())

    def _places(self) -> dict[int, str]:
        """Lengths that the findings quote, and their names."""
        C, T = self.target.training_length, self.target.length
        if T <= C:
            return {T: f"Near {T:,} tokens"}
        return {C: f"Near the training length of {C:,} tokens", T: f"near {T:,} ({T / C:g} C)"}

    def _findings(self) -> list[str]:
        # The first bucket holds only the first key.
        first, others = self.curves["key_norm"][..., 0], self.curves["median_key_norm"]
        weights = {
            place: self._near("rotated.sink_weight", n) for n, place in self._places().items()
        }
        lengths = f"({' → '.join(f'{n:,}' for n in self._places())} tokens"
        findings = [
            f"The first key is shorter than the median key in {100 * (first < others).mean():.0f}% "
            f"of {first.size} key heads; its length is {(first / others).mean():.2f} times the "
            "median, mean over heads.",
            ", and ".join(
                f"{place} the first token gets {100 * weight.mean():.1f}% of the attention, "
                f"and more than half of it in {(weight > HALF).sum()} of {weight.size} heads"
                for place, weight in weights.items()
            )
            + ".",
        ]
        if "learned_sink" in self.curves:
            by_layer = 100 * self._near("learned_sink", max(self._places())).mean(axis=-1)
            findings.append(
                f"There the learned sinks take {by_layer.mean():.1f}% of the attention, by "
                f"layer {', '.join(f'{share:.0f}%' for share in by_layer)}."
            )
        if not self._has_sink():
            findings.append(
                "No head has a sink within the training length: heads with nothing to retrieve "
                "spread their attention, or put it on other tokens."
            )
        findings += [
            f"The largest dot product of a query, {label}: "
            f"{self._means_near(f'{version}.peak', '.3g')} {lengths})."
            for version, (label, _) in self._of("peak").items()
        ]
        if "plain" not in self.versions:
            findings.append(
                "Without rotation, order is in the states alone: the token just before gets "
                f"{self._means_near('previous', '.2f')} times the attention that uniform attention "
                "would give it, and entropy divided by the entropy of uniform attention is "
                f"{self._means_near('entropy', '.2f')} {lengths}, mean over heads)."
            )
        return findings

    def _has_sink(self) -> bool:
        """Whether a head puts far more attention on the first token than uniform attention."""
        n = min(self.target.training_length, self.target.length)
        return bool(self._near("rotated.sink_weight", n).max() > max(SINK / n, 0.1))

    def _numbers(self) -> dict[str, Any]:
        lists = {name: to_json(curve) for name, curve in self.curves.items()}
        return {
            "training_length": self.target.training_length,
            "layers": self._averages.layers,
            "edges": self.edges,
            "key_norm": lists["key_norm"],
            **{
                version: {measure: lists[f"{version}.{measure}"] for measure in MEASURES}
                for version in ("plain", "rotated")
            },
            **{name: lists[name] for name in (*FROM_STATES, "learned_sink") if name in lists},
            "glance": [indicator.to_dict() for indicator in self._glance()],
        }

    def _glance(self) -> list[Indicator]:
        C, T = self.target.training_length, self.target.length
        # Quarter octaves that end at the training length and at the end of the text.
        ends = {T, min(C, T)} | {round(C * 2 ** (i / 4)) for i in range(-12, 40)}
        lengths = sorted(n for n in ends if 8 <= n <= T)

        def indicator(title: str, name: str, wanted: Any, meaning: str, **more: Any) -> Indicator:
            values = [float(self._near(name, n).mean()) for n in lengths]
            return Indicator(title, lengths, values, C, wanted, meaning, **more)

        has_sink = self._has_sink()
        sink = indicator(
            "Attention on the first token",
            "rotated.sink_weight",
            "high",
            "by the queries near each length, mean over heads"
            + ("" if has_sink else "; no head here has a sink"),
            percent=True,
            least=0.01,
            judged=has_sink,
        )
        if "plain" in self.versions:
            meaning = "over keys, mean over queries and heads"
            peak = indicator("Largest dot product", "rotated.peak", "low", meaning, least=1.0)
            return [sink, peak]
        return [
            sink,
            indicator(
                "The token before, over uniform",
                "previous",
                "high",
                "order from the states alone; 1: none, mean over heads",
                judged=False,
            ),
            indicator(
                "Entropy of attention",
                "entropy",
                "low",
                "1: uniform; without a rotation this is what length changes",
            ),
        ]

    def _collapse(self) -> Picture:
        """Draw attention on the sink and the largest dot products by length (Fig. 6)."""
        curves = self._both("sink_weight", "peak")
        panels = [
            Panel("attention on the first token", self._lines("sink_weight"), Frame("", "share")),
            Panel("largest dot product of a query", self._lines("peak"), Frame("", "dot product")),
        ]
        return Picture(
            name="sinks_by_length",
            figure=self._by_length(panels, "length of the text (tokens)"),
            caption=(
                "Attention of queries at the end of a text of this length; mean and 80% of heads. "
                f"{self._passes()}"
                "Left: the weight of the first token. Right: the largest dot product with any key. "
                "Where the left curve falls past the training length while the right one rises, "
                "accidental matches take the sink's weight."
            ),
            header=HEADER,
            rows=self._rows(curves),
        )

    def _passes(self) -> str:
        """Say which text a query is part of, if its attention depends on that."""
        if self.target.prefix is None:
            return ""
        return (
            "The encoding follows the length of the text: queries within the training length are "
            f"read in a text of {self.target.training_length:,} tokens, later ones in one of "
            f"{self.target.length:,}. "
        )

    def _keys(self) -> Picture:
        """Draw norms of keys and their dot products with later queries by position (Fig. 5)."""
        dots = self._both("key_dot")
        relative = {
            (version, "key_dot_over_largest"): over_largest(products)
            for (version, _), products in dots.items()
        }
        norms = self.curves["key_norm"]
        lines = [
            self._line(*self._of("key_dot")[version], products)
            for (version, _), products in relative.items()
        ]
        panels = [
            Panel("length of keys", [self._line("all keys", 0, norms)], Frame("", "‖k‖")),
            Panel("dot product with later queries", lines, Frame("", "over the largest of a head")),
        ]
        return Picture(
            name="sinks_keys",
            figure=self._by_length(panels, "position of the key"),
            caption=(
                f"Left: length of a key {before(self.versions)}, by its position, the first token "
                "at 1. Right: its dot product with its own and all later queries, mean, over the "
                "largest such mean of the head. A sink is a first key that is short and whose dot "
                "product is the largest, 1. Mean and 80% of heads."
            ),
            header=HEADER,
            rows=self._rows({("all", "key_norm"): norms, **dots, **relative}),
        )

    def _heads(self) -> Picture:
        """Draw the sink weight of every head at the training length and at the end of the text."""
        T = self.target.length
        lengths = dict.fromkeys([min(self.target.training_length, T), T])
        maps = {n: self._near("rotated.sink_weight", n) for n in lengths}
        return Picture(
            name="sinks_heads",
            figure=heat_maps(
                {f"near {n:,} tokens": weights for n, weights in maps.items()},
                Scale("attention on the first token", 0, 1),
                x="query head",
                y="layer",
                height=max(1.5, min(3.0, 0.5 + 0.09 * len(maps[T]))),
            ),
            caption=(
                "Attention on the first token of every head, mean over the queries of the last "
                "quarter of so many tokens."
                + (
                    " Heads that darken from left to right lose their sink."
                    if len(maps) > 1
                    else ""
                )
            ),
            header=("length", "layer", "head", "attention"),
            rows=long_rows({(n,): weights for n, weights in maps.items()}),
        )

    def _attention(self) -> Picture:
        """Draw the attention of the chosen heads, or of those with the most, a medium and the least
        weight on the sink (Fig. 9)."""
        shown = list(self._maps)
        if not self.target.chosen:
            shown = extremes(shown, key=lambda place: -self._shares[place])
        step = -(-self.target.length // len(self._maps[shown[0]]))
        figure, rows = draw_attention_maps(
            {place: self._maps[place] for place in shown},
            [f"L{i}H{j}: {100 * self._shares[i, j]:.0f}% on the first" for i, j in shown],
            step,
            low=1e-4,
            columns=3,
            height=2.35,
        )
        return Picture(
            name="sinks_attention",
            figure=figure,
            caption=(
                f"Attention of {counted(len(shown), 'head')} on the first text, in cells of {step} "
                f"× {step} tokens (logarithmic colour; grey: not seen). A bright left edge is the "
                "sink, a bright diagonal is attention on the tokens just before."
            ),
            header=MAP_HEADER,
            rows=rows,
        )

    def _without_rotation(self) -> Picture:
        """Draw attention on the previous token and entropy of a model that does not rotate."""
        look = self.versions["rotated"]
        panels = [
            Panel(title, [self._line(*look, self.curves[name])], Frame("", label))
            for name, title, label in (
                ("previous", "attention on the token before", "times uniform"),
                ("entropy", "entropy of attention", "1: uniform"),
            )
        ]
        return Picture(
            name="sinks_without_rotation",
            figure=self._by_length(panels, "length of the text (tokens)"),
            caption=(
                "How a model without rotation attends. Left: attention on the token just before, "
                "divided by uniform attention; above 1, order is read from the states. Right: "
                "entropy over the logarithm of the keys in sight; a rise past the training length "
                "is attention that thins out, which a softmax temperature mends. "
                f"{self._passes()}Mean and 80% of heads."
            ),
            header=HEADER,
            rows=self._rows({("rotated", name): self.curves[name] for name in FROM_STATES}),
        )

    @property
    def positions(self) -> list[float]:
        """Middles of the buckets, from position 1 on."""
        edges = np.array(self.edges)
        return ((edges[:-1] + 1 + edges[1:]) / 2).tolist()

    def _line(self, label: str, style: int, curve: Array) -> Series:
        return over_heads(label, style, self.positions, curve, marked=False)

    def _lines(self, measure: str) -> list[Series]:
        return [
            self._line(*self._of(measure)[version], curve)
            for (version, _), curve in self._both(measure).items()
        ]

    def _of(self, measure: str) -> Versions:
        """Return the versions of a measure: ALiBi's bias is added to scores and changes no dot
        product."""
        if measure == "sink_weight" or self.target.rotates or "plain" not in self.versions:
            return self.versions
        return {"plain": self.versions["plain"]}

    def _both(self, *measures: str) -> dict[tuple[str, str], Array]:
        return {
            (version, measure): self.curves[f"{version}.{measure}"]
            for version in self.versions
            for measure in measures
            if version in self._of(measure)
        }

    def _by_length(self, panels: Sequence[Panel], x_label: str) -> Figure:
        return by_length(panels, x_label=x_label, trained=self.target.training_length)

    def _rows(self, curves: Mapping[tuple[str, str], Array]) -> list[tuple[object, ...]]:
        """Return the values of drawn curves; the section's numbers hold the values of heads."""
        lines = {names: self._line("", 0, curve) for names, curve in curves.items()}
        return [
            (*names, self.edges[i], self.edges[i + 1], *values)
            for names, line in lines.items()
            for i, values in enumerate(zip(line.y, line.low or (), line.high or (), strict=True))
        ]


def _is_bare(heads: Heads) -> bool:
    """Whether a layer's encoding leaves attention unchanged."""
    if any(spectrum.rotates or spectrum.alibi for spectrum in heads.encoding.spectra):
        return False
    return torch.equal(heads.q, heads.rotated_q) and torch.equal(heads.k, heads.rotated_k)


def mean_at(values: Array, edges: Sequence[int], length: int) -> Array:
    """Select ``values`` ``[..., buckets]`` in the last quarter of ``length`` first positions."""
    start, stop = np.array(edges[:-1]), np.array(edges[1:])
    among = (np.minimum(stop, length) - np.maximum(start, 3 * length // 4)).clip(min=0)
    mean: Array = values @ among / among.sum()
    return mean


def over_largest(products: Array) -> Array:
    """Divide ``[..., buckets]`` by the largest bucket, as in Fig. 5; if all are negative, by the
    absolute value of the most negative one."""
    top = products.max(axis=-1, keepdims=True)
    scale: Array = np.where(top > 0, top, np.abs(products).max(axis=-1, keepdims=True))
    scaled: Array = products / np.maximum(scale, np.finfo(float).tiny)
    return scaled
