"""Figures of attention sinks (RoPE-ID Fig. 5, 6 and 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.sinks import SinkResult
from trainer.analysis.studies.section import Picture
from trainer.analysis.studies.versions import Versions, before
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, over_heads
from trainer.plotting.maps import Scale, heat_maps

HEADER = ("version", "measure", "from_position", "to_position", "mean", "low", "high")


def near(values: Array, edges: Sequence[int], length: int) -> Array:
    """``values`` ``[..., buckets]`` of the last quarter of the first ``length`` positions."""
    start, stop = np.array(edges[:-1]), np.array(edges[1:])
    among = (np.minimum(stop, length) - np.maximum(start, 3 * length // 4)).clip(min=0)
    mean: Array = values @ among / among.sum()
    return mean


def over_largest(products: Array) -> Array:
    """``[..., buckets]``, over the largest of all buckets, as Fig. 5 has them; where all are
    negative, over the size of the most negative one."""
    top = products.max(axis=-1, keepdims=True)
    scale: Array = np.where(top > 0, top, np.abs(products).max(axis=-1, keepdims=True))
    found: Array = products / np.maximum(scale, np.finfo(float).tiny)
    return found


@dataclass(frozen=True)
class AttentionMap:
    """Attention ``[cells, cells]`` of a head, and what it puts on the first token, a share."""

    layer: int
    head: int
    sink: float
    cells: Array


@dataclass(frozen=True)
class SinkPictures:
    """``found`` in the versions that differ, of texts of ``length`` tokens; ``trained``: C."""

    found: SinkResult
    versions: Versions
    trained: int
    length: int

    @property
    def positions(self) -> list[float]:
        """The middle of every bucket, from 1 on."""
        edges = np.array(self.found.edges)
        return ((edges[:-1] + 1 + edges[1:]) / 2).tolist()

    def collapse(self) -> Picture:
        """Attention on the sink and the largest dot product by length (Fig. 6)."""
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
        """Norms of keys and their dot products with later queries by position (Fig. 5)."""
        norms = over_heads("all keys", 0, self.positions, self.found.key_norm, marked=False)
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
            ("all", "key_norm", self.found.key_norm),
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
        """Which heads sink, at the training length and at the end."""
        places = list(dict.fromkeys([min(self.trained, self.length), self.length]))
        weight, edges = self.found.rotated.sink_weight, self.found.edges
        maps = {f"near {n:,} tokens": near(weight, edges, n) for n in places}
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
        """Attention of some heads (Fig. 9)."""
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
        """What carries order, and how attention spreads, in a model that does not rotate."""
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
                getattr(getattr(self.found, version), measure),
                marked=False,
            )
            for version, (label, style) in self.versions.items()
        ]

    def _both(self, *measures: str) -> list[tuple[str, str, Array]]:
        return [
            (version, measure, getattr(getattr(self.found, version), measure))
            for version in self.versions
            for measure in measures
        ]

    def _rows(self, sets: Sequence[tuple[str, str, Array]]) -> list[tuple[object, ...]]:
        """What the curves show; single heads are in the numbers of the section."""
        edges = self.found.edges
        curves = [(v, name, over_heads("", 0, self.positions, of)) for v, name, of in sets]
        return [
            (version, name, edges[i] + 1, edges[i + 1], *values)
            for version, name, one in curves
            for i, values in enumerate(zip(one.y, one.low or (), one.high or (), strict=True))
        ]
