"""The section on the first token as an attention sink, and on how the sink changes in long texts
(RoPE-ID Sec. 3.2, App. A.2; Fig. 5, 6 and 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.analysis.arrays import Array, Averages, bucket_means, to_json
from trainer.analysis.attention import Rows, attention_rows
from trainer.analysis.capture import Heads
from trainer.analysis.sinks.measure import SinkResult, Sinks, attention_map
from trainer.analysis.studies.section import Indicator, Picture, Section
from trainer.analysis.studies.study import Study, Target, Versions, before, versions
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, over_heads
from trainer.plotting.maps import Scale, heat_maps

HALF, SINK = 0.5, 4
SHOWN, CELLS = 3, 128
OF_ROWS = ("previous", "entropy")


class SinksStudy(Study):
    """Norms of keys, attention on the first key, and the largest dot products, by position."""

    key: ClassVar[str] = "sinks"
    title: ClassVar[str] = "Attention sinks"
    shortest: ClassVar[int] = 8  # other positions than the first

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.sinks = Sinks()
        self.versions = versions(target, scores=True)
        self._rows = Averages()
        self._maps: list[AttentionMap] = []
        self._learned: tuple[str, ...] = ()

    def on_layer(self, heads: Heads) -> None:
        """Read every row of attention with the encoding and, if it changes attention, without."""
        rotated = attention_rows(heads)
        bare = rotated if _is_bare(heads) else attention_rows(heads, rotated=False)
        self.sinks.update(heads, bare, rotated)
        edges = self.sinks.edges
        # A query that sees one key has entropy 0; log 2 avoids 0 / 0.
        largest = rotated.visible.clamp(min=2).log()
        self._rows.add(
            heads.layer,
            previous=bucket_means(rotated.previous * rotated.visible, edges),
            entropy=bucket_means(rotated.entropy / largest, edges),
        )
        if heads.sinks is not None:
            self._rows.add(heads.layer, learned_sink=bucket_means(rotated.learned, edges))
            self._learned = ("learned_sink",)
        for head in self._pictured(heads, rotated):
            sink = float(rotated.sink[0, head, 1:].mean())
            shown = attention_map(heads, head, size=CELLS)
            self._maps.append(AttentionMap(heads.layer, head, sink, shown))

    def _pictured(self, heads: Heads, rows: Rows) -> list[int]:
        if self.target.chosen:
            return [head for layer, head in self.target.chosen if layer == heads.layer]
        if heads.layer not in self.target.sampled_layers:
            return []
        order = rows.sink[0, :, 1:].mean(dim=-1).argsort().tolist()
        return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))

    def section(self) -> Section:
        """Write the section: curves by position, a map of heads, attention of some heads."""
        result = self.sinks.result()
        of_rows = {name: self._rows.stacked(name) for name in (*OF_ROWS, *self._learned)}
        pictures = SinkPictures(
            result, self.versions, self.target.training_length, self.target.length
        )
        return Section(
            self.key,
            self.title,
            "Softmax must put its weight somewhere. A head that has nothing to retrieve puts it on "
            "a placeholder, mostly the first token, whose key is short: where queries and keys lie "
            "on opposite sides of the origin, a key near the origin has the largest dot product. "
            f"{'When the rotation of' if self.target.rotates else 'Where'} a long text spreads the "
            "clouds, other keys get large dot "
            "products by accident and the sink loses its weight. Positions are those of a text "
            "that begins with a beginning-of-text token and holds no other separator, as each "
            "would be a sink of its own; they are counted from 1.",
            (
                "attention on the first key = α_{i1} = softmax_j(⟨q_i, k_j⟩ / √d)₁",
                "dot product of key j = mean over i ≥ j of ⟨q_i, k_j⟩",
                "largest dot product of query i = max over j ≤ i of ⟨q_i, k_j⟩",
            ),
            "RoPE-ID (Frayed RoPE and Long Inputs), Sec. 3.2, App. A.2; Fig. 5, 6, 9.",
            self._findings(result, of_rows),
            (
                pictures.collapse(),
                pictures.keys(),
                pictures.heads(),
                *([pictures.attention(self._shown())] if self._maps else []),
                *(
                    []
                    if "plain" in self.versions
                    else [pictures.without_rotation({name: of_rows[name] for name in OF_ROWS})]
                ),
            ),
            numbers=self._numbers(result, of_rows),
        )

    def _places(self) -> dict[int, str]:
        """Buckets that the findings quote, and their names."""
        C, T = self.target.training_length, self.target.length
        if T <= C:
            return {T: f"Near {T:,} tokens"}
        return {C: f"Near the training length of {C:,} tokens", T: f"near {T:,} ({T / C:g} C)"}

    def _findings(self, result: SinkResult, of_rows: dict[str, Array]) -> tuple[str, ...]:
        # The first bucket holds only the first key.
        first, others = result.key_norm[..., 0], np.median(result.key_norm[..., 1:], axis=-1)
        findings = [
            f"The first key is shorter than the median key in {100 * (first < others).mean():.0f}% "
            f"of {first.size} key heads; its length is {(first / others).mean():.2f} times the "
            "median, mean over heads."
        ]
        weights = {n: mean_at(result.rotated.sink_weight, result.edges, n) for n in self._places()}
        findings.append(
            ", and ".join(
                f"{place} the first token gets {100 * weights[n].mean():.1f}% of the attention, "
                f"and more than half of it in {(weights[n] > HALF).sum()} of {weights[n].size} "
                "heads"
                for n, place in self._places().items()
            )
            + "."
        )
        if self._learned:
            taken = mean_at(of_rows["learned_sink"], result.edges, max(weights)).mean(axis=-1)
            findings.append(
                f"There the learned sinks take {100 * taken.mean():.1f}% of the attention, by "
                f"layer {', '.join(f'{100 * one:.0f}%' for one in taken)}."
            )
        if not self._has_sink(result):
            findings.append(
                "No head has a sink within the training length: nothing takes what is left over, "
                "or other tokens do."
            )
        ends = list(self._places())
        for version, (label, _) in self.versions.items():
            peak = getattr(result, version).peak
            values = [mean_at(peak, result.edges, n).mean() for n in ends]
            way = " → ".join(f"{value:.3g}" for value in values)
            findings.append(
                f"The largest dot product of a query, {label}: {way} "
                f"({' → '.join(f'{n:,}' for n in ends)} tokens)."
            )
        if "plain" not in self.versions:
            before = " → ".join(
                f"{mean_at(of_rows['previous'], result.edges, n).mean():.2f}" for n in ends
            )
            spread = " → ".join(
                f"{mean_at(of_rows['entropy'], result.edges, n).mean():.2f}" for n in ends
            )
            findings.append(
                "Without rotation, order is in the states alone: the token just before gets "
                f"{before} times what uniform attention would give it, and entropy over that of "
                f"uniform attention is {spread} ({' → '.join(f'{n:,}' for n in ends)} tokens, mean "
                "over heads)."
            )
        return tuple(findings)

    def _has_sink(self, result: SinkResult) -> bool:
        """Whether a head puts far more attention on the first token than uniform attention."""
        n = min(self.target.training_length, self.target.length)
        largest = mean_at(result.rotated.sink_weight, result.edges, n).max()
        return bool(largest > max(SINK / n, 0.1))

    def _shown(self) -> list[AttentionMap]:
        """Return the chosen heads, or those with the most, a medium and the least weight on the
        sink."""
        if self.target.chosen or len(self._maps) <= SHOWN:
            return self._maps
        ordered = sorted(self._maps, key=lambda one: -one.sink)
        return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]

    def _numbers(self, result: SinkResult, of_rows: dict[str, Array]) -> dict[str, Any]:
        return {
            "training_length": self.target.training_length,
            "layers": result.layers,
            "edges": result.edges,
            "key_norm": to_json(result.key_norm),
            **{
                version: {
                    name: to_json(getattr(getattr(result, version), name))
                    for name in type(result.plain).__annotations__
                }
                for version in ("plain", "rotated")
            },
            **{name: to_json(values) for name, values in of_rows.items()},
            "glance": [one.to_dict() for one in self._glance(result, of_rows)],
        }

    def _glance(self, result: SinkResult, of_rows: dict[str, Array]) -> list[Indicator]:
        C, T = self.target.training_length, self.target.length
        # Quarter octaves that end at the training length and at the end of the text.
        ends = {T, min(C, T)} | {round(C * 2 ** (i / 4)) for i in range(-12, 40)}
        lengths = sorted(n for n in ends if 8 <= n <= T)

        def indicator(
            name: str, values: Array, wanted: Any, meaning: str, **more: Any
        ) -> Indicator:
            y = [float(mean_at(values, result.edges, n).mean()) for n in lengths]
            return Indicator(name, lengths, y, C, wanted, meaning, **more)

        has_sink = self._has_sink(result)
        shown = [
            indicator(
                "Attention on the first token",
                result.rotated.sink_weight,
                "high",
                "by the queries near each length, mean over heads"
                + ("" if has_sink else "; no head here has a sink"),
                percent=True,
                least=0.01,
                judged=has_sink,
            )
        ]
        if "plain" in self.versions:
            peak, meaning = result.rotated.peak, "over keys, mean over queries and heads"
            shown.append(indicator("Largest dot product", peak, "low", meaning, least=1.0))
            return shown
        return [
            *shown,
            indicator(
                "The token before, over uniform",
                of_rows["previous"],
                "high",
                "order from the states alone; 1: none, mean over heads",
                judged=False,
            ),
            indicator(
                "Entropy of attention",
                of_rows["entropy"],
                "low",
                "1: uniform; without a rotation this is what length changes",
            ),
        ]


def _is_bare(heads: Heads) -> bool:
    """Whether a layer's encoding leaves attention unchanged."""
    if any(s.rotates or s.alibi for s in heads.encoding.spectra):
        return False
    return torch.equal(heads.q, heads.rotated_q) and torch.equal(heads.k, heads.rotated_k)


HEADER = ("version", "measure", "from_position", "to_position", "mean", "low", "high")


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


@dataclass(frozen=True)
class AttentionMap:
    """Attention ``[cells, cells]`` of a head, and the share of its attention on the first token."""

    layer: int
    head: int
    sink: float
    cells: Array


@dataclass(frozen=True)
class SinkPictures:
    """Draws ``result`` in the versions that differ; ``length``: of a text; ``trained``: C."""

    result: SinkResult
    versions: Versions
    trained: int
    length: int

    @property
    def positions(self) -> list[float]:
        """Middles of the buckets, from position 1 on."""
        edges = np.array(self.result.edges)
        return ((edges[:-1] + 1 + edges[1:]) / 2).tolist()

    def collapse(self) -> Picture:
        """Draw attention on the sink and the largest dot products by length (Fig. 6)."""
        panels = [
            Panel(title, self._lines(measure), Frame("", label))
            for measure, title, label in (
                ("sink_weight", "attention on the first token", "share"),
                ("peak", "largest dot product of a query", "dot product"),
            )
        ]
        return Picture(
            "sinks_by_length",
            by_length(panels, x_label="length of the text (tokens)", trained=self.trained),
            "What queries at the end of a text of this length do; mean and 80% of heads. Left: the "
            "weight that the first token gets. Right: the largest dot product with any key. Where "
            "the left curve falls past the training length while the right one rises, accidental "
            "matches take the sink's weight.",
            HEADER,
            self._rows(self._both("sink_weight", "peak")),
        )

    def keys(self) -> Picture:
        """Draw norms of keys and their dot products with later queries by position (Fig. 5)."""
        norms = over_heads("all keys", 0, self.positions, self.result.key_norm, marked=False)
        relative = {v: over_largest(of) for v, _, of in self._both("key_dot")}
        shown = [
            over_heads(label, style, self.positions, relative[version], marked=False)
            for version, (label, style) in self.versions.items()
        ]
        panels = [
            Panel("length of keys", [norms], Frame("", "‖k‖")),
            Panel("dot product with later queries", shown, Frame("", "over the largest of a head")),
        ]
        both = [
            ("all", "key_norm", self.result.key_norm),
            *self._both("key_dot"),
            *((version, "key_dot_over_largest", of) for version, of in relative.items()),
        ]
        return Picture(
            "sinks_keys",
            by_length(panels, x_label="position of the key", trained=self.trained),
            f"Left: length of a key {before(self.versions)}, by its position, the first token at "
            "1. Right: its dot product with its own and all later queries, mean, over the largest "
            "such mean of the head. A sink is a first key that is short and whose dot product is "
            "the largest, 1. Mean and 80% of heads.",
            HEADER,
            self._rows(both),
        )

    def heads(self) -> Picture:
        """Draw the sink weight of every head at the training length and at the end of the text."""
        places = list(dict.fromkeys([min(self.trained, self.length), self.length]))
        weight, edges = self.result.rotated.sink_weight, self.result.edges
        maps = {f"near {n:,} tokens": mean_at(weight, edges, n) for n in places}
        return Picture(
            "sinks_heads",
            heat_maps(
                maps,
                Scale("attention on the first token", 0, 1),
                x="query head",
                y="layer",
                height=max(1.5, min(3.0, 0.5 + 0.09 * weight.shape[0])),
            ),
            "Attention on the first token of every head, mean over the queries of the last quarter "
            "of so many tokens."
            + (" Heads that darken from left to right lose their sink." if len(maps) > 1 else ""),
            ("length", "layer", "head", "attention"),
            [
                (n, *at, float(value))
                for n, of in zip(places, maps.values(), strict=True)
                for at, value in np.ndenumerate(of)
            ],
        )

    def attention(self, shown: Sequence[AttentionMap]) -> Picture:
        """Draw the attention of some heads (Fig. 9)."""
        step = -(-self.length // len(shown[0].cells))
        return Picture(
            "sinks_attention",
            heat_maps(
                {
                    f"L{one.layer}H{one.head}: {100 * one.sink:.0f}% on the first": np.where(
                        one.cells > 0, one.cells, np.nan
                    )
                    for one in shown
                },
                Scale("attention of a query on a cell", low=1e-4, high=1, log=True),
                x="key (tokens)",
                y="query (tokens)",
                columns=3,
                cell=(step, step),
                height=2.35,
            ),
            f"Attention of {counted(len(shown), 'head')} on the first text, in cells of "
            f"{step} × {step} tokens (logarithmic colour; grey: not seen). A bright left edge is "
            "the sink, a bright diagonal is attention on what came just before.",
            ("layer", "head", "from_query", "from_key", "attention"),
            [
                (one.layer, one.head, int(i) * step, int(j) * step, float(one.cells[i, j]))
                for one in shown
                for i, j in zip(*np.tril_indices(len(one.cells)), strict=True)
            ],
        )

    def without_rotation(self, of_rows: Mapping[str, Array]) -> Picture:
        """Draw attention on the previous token and entropy of a model that does not rotate."""
        titles = {
            "previous": ("attention on the token before", "times uniform"),
            "entropy": ("entropy of attention", "1: uniform"),
        }
        label, style = self.versions["rotated"]
        panels = [
            Panel(
                titles[name][0],
                [over_heads(label, style, self.positions, of, marked=False)],
                Frame("", titles[name][1]),
            )
            for name, of in of_rows.items()
        ]
        return Picture(
            "sinks_without_rotation",
            by_length(panels, x_label="length of the text (tokens)", trained=self.trained),
            "What a model without rotation lives on. Left: attention on the token just before, "
            "over that of uniform attention; above 1, order is read from the states. Right: "
            "entropy over the logarithm of the keys in sight; a rise past the training length is "
            "attention that thins out, which a softmax temperature mends. Mean and 80% of heads.",
            HEADER,
            self._rows([("rotated", name, of) for name, of in of_rows.items()]),
        )

    def _lines(self, measure: str) -> list[Series]:
        return [
            over_heads(
                label,
                style,
                self.positions,
                getattr(getattr(self.result, version), measure),
                marked=False,
            )
            for version, (label, style) in self.versions.items()
        ]

    def _both(self, *measures: str) -> list[tuple[str, str, Array]]:
        return [
            (version, measure, getattr(getattr(self.result, version), measure))
            for version in self.versions
            for measure in measures
        ]

    def _rows(self, sets: Sequence[tuple[str, str, Array]]) -> list[tuple[object, ...]]:
        """Return the values of the curves; values of single heads are in the section's numbers."""
        edges = self.result.edges
        curves = [(v, name, over_heads("", 0, self.positions, of)) for v, name, of in sets]
        return [
            (version, name, edges[i] + 1, edges[i + 1], *values)
            for version, name, one in curves
            for i, values in enumerate(zip(one.y, one.low or (), one.high or (), strict=True))
        ]
