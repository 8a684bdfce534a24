"""The first token as an attention sink: its short key, the attention on it, and how both change in
long texts (RoPE-ID Sec. 3.2, App. A.2; Fig. 5, 6 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from trainer.analysis.attention import Array, Heads, Place, attention_map, attention_rows, capture
from trainer.analysis.topic import (
    Target,
    Topic,
    bucket_means,
    position_edges,
    stacked,
    tidy,
    versions,
)
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, by_length, over_heads
from trainer.plotting.style import Plot

CELLS, LAYERS = 128, 8
"""Cells of a map's side, and about how many layers it is chosen from."""
MEASURES = ("key_dot", "sink_weight", "peak")
"""Measures with and without the encoding: the mean dot product of a key with its own query and all
later ones, by the key's position; attention on the first key, and the largest dot product with a
key, both by the query's position, which is the length of the text so far."""


def key_dot(q: Tensor, k: Tensor) -> Tensor:
    """Compute the mean of q_i k_j over i >= j, ``[B, Hq, T]``: each key times the mean of its
    queries."""
    T = q.shape[2]
    later = q.double().flip(2).cumsum(dim=2).flip(2)
    later /= torch.arange(T, 0, -1, device=q.device)[:, None]
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (later * shared).sum(dim=-1)


def over_largest(products: Array) -> Array:
    """Divide ``[..., buckets]`` by the largest bucket, as in Fig. 5; if all are negative, by the
    absolute value of the most negative one."""
    top = products.max(axis=-1, keepdims=True)
    scale: Array = np.where(top > 0, top, np.abs(products).max(axis=-1, keepdims=True))
    scaled: Array = products / np.maximum(scale, np.finfo(float).tiny)
    return scaled


def map_figure(maps: Mapping[str, Array], step: int, low: float, *, height: float = 2.35) -> Figure:
    """Draw maps of attention by title, in cells of ``step`` tokens; ``low``: the darkest colour."""
    visible = {title: np.where(cells > 0, cells, np.nan) for title, cells in maps.items()}
    scale = Scale("attention of a query on a cell", low=low, high=1, log=True)
    x, y = "key (tokens)", "query (tokens)"
    return heat_maps(visible, scale, x=x, y=y, cell=(step, step), columns=3, height=height)


class SinkFigures(Topic):
    """Norms of keys, attention on the first key, and the largest dot products, by position.

    ``curves``: means within buckets of positions, ``[layers, heads, buckets]``, by name; bucket b
    holds positions ``edges[b]`` to ``edges[b + 1] - 1``.
    """

    key = "sinks"
    title = "Attention sinks"
    shortest = 8  # other positions than the first

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.versions = versions(target, scores=True)
        self.edges = position_edges(target.length)
        if target.prefix is not None:  # no bucket holds positions of both passes
            self.edges = sorted({*self.edges, target.training_length})
        self.curves: dict[str, Array] = {}
        self._layers: list[dict[str, Tensor]] = []
        self._within: list[dict[str, Tensor]] = []
        self._maps: dict[Place, Array] = {}

    def _bucketed(self, heads: Heads) -> dict[str, Tensor]:
        """Return means within the buckets of positions, ``[B, heads, buckets]``."""
        values = {"key_norm": heads.k.norm(dim=-1)}
        for version in self.versions:
            rotated = version == "rotated"
            q, k = (heads.rotated_q, heads.rotated_k) if rotated else (heads.q, heads.k)
            rows = attention_rows(heads, rotated=rotated)
            measured = (key_dot(q, k), rows.sink, rows.peak)
            names = (f"{version}.{measure}" for measure in MEASURES)
            values |= dict(zip(names, measured, strict=True))
        edges = [edge for edge in self.edges if edge <= heads.q.shape[2]]
        return {name: bucket_means(value, edges) for name, value in values.items()}

    def _on_layer(self, heads: Heads) -> None:
        """Measure all heads, and map the attention of those that may be shown."""
        bucketed = self._bucketed(heads)
        self._layers.append(bucketed)
        chosen = [head for layer, head in self.target.config.chosen if layer == heads.layer]
        if not self.target.config.chosen:
            # The heads with the least, a medium and the most weight on the first key.
            order = bucketed["rotated.sink_weight"][0].mean(dim=-1).argsort().tolist()
            layers = len(self.target.model.layout.layers)
            chosen = [order[0], order[len(order) // 2], order[-1]]
            chosen = chosen if heads.layer % max(1, layers // LAYERS) == 0 else []
        for head in chosen:
            self._maps[heads.layer, head] = attention_map(heads, head, size=CELLS)

    def _on_prefix(self, heads: Heads) -> None:
        """Measure what depends on the query's position within the training length."""
        of_keys = ("key_norm", "plain.key_dot", "rotated.key_dot")
        values = self._bucketed(heads).items()
        self._within.append({name: value for name, value in values if name not in of_keys})

    def measure(self) -> None:
        """Read the texts, and average over them."""
        capture(self.target.model, self.target.ids, self._on_layer)
        if self.target.prefix is not None:
            capture(self.target.model, self.target.prefix, self._on_prefix)
        self.curves = stacked(self._layers, self._within)

    def plots(self) -> list[Plot]:
        """Draw curves by position, and the attention of some heads."""
        norms = [self._line("all keys", 0, self.curves["key_norm"])]
        by_query = {
            "attention on the first token": ("share", self._lines("sink_weight")),
            "largest dot product of a query": ("dot product", self._lines("peak")),
        }
        by_key = {
            "length of keys": ("‖k‖", norms),
            "dot product with later queries": (
                "over the largest of a head",
                self._lines("key_dot", over_largest),
            ),
        }
        plots = [
            self._draw(
                "sinks_by_length",
                by_query,
                "length of the text (tokens)",
                "Queries at the end of a text of this length, mean and 80% of heads (RoPE-ID, "
                "Fig. 6).",
            ),
            self._draw(
                "sinks_keys",
                by_key,
                "position of the key",
                "Length of keys before the encoding, and their mean dot product with later "
                "queries, by position (RoPE-ID, Fig. 5).",
            ),
        ]
        return [*plots, *([self._attention()] if self._maps else [])]

    def rows(self) -> pd.DataFrame:
        """Return curves by the last position of a bucket."""
        curves = {f"{v}.{m}": (m, v) for m in MEASURES for v in self._versions_of(m)}
        curves["key_norm"] = ("key_norm", "plain")
        axes, places = ("layer", "head", "length"), {"length": self.edges[1:]}
        return pd.concat(
            tidy({metric: self.curves[name]}, *axes, places=places, variant=variant)
            for name, (metric, variant) in curves.items()
        )

    def _attention(self) -> Plot:
        """Draw the chosen heads, or those with the most, a medium and the least weight on the
        sink at the end of the text."""
        shares = self.curves["rotated.sink_weight"][..., -1]
        shown = list(self._maps)
        if not self.target.config.chosen:
            shown.sort(key=lambda place: -shares[place])
            shown = [shown[0], shown[len(shown) // 2], shown[-1]]
        step = -(-self.target.length // len(self._maps[shown[0]]))
        maps = {
            f"L{i}H{j}: {100 * shares[i, j]:.0f}% on the first": self._maps[i, j] for i, j in shown
        }
        return Plot(
            "sinks_attention",
            map_figure(maps, step, 1e-4),
            f"Attention of single heads on the first text, cells of {step} × {step} tokens, "
            "logarithmic colour (RoPE-ID, Fig. 9; Rotary Offset Features, Fig. 3).",
        )

    def _line(self, label: str, style: int, curve: Array) -> Line:
        edges = np.array(self.edges)
        middles = ((edges[:-1] + 1 + edges[1:]) / 2).tolist()
        return over_heads(label, style, middles, curve, marked=False)

    def _lines(
        self, measure: str, change: Callable[[Array], Array] = lambda curve: curve
    ) -> list[Line]:
        return [
            self._line(*self.versions[version], change(self.curves[f"{version}.{measure}"]))
            for version in self._versions_of(measure)
        ]

    def _versions_of(self, measure: str) -> list[str]:
        """Return the versions of a measure: ALiBi's bias is added to scores and changes no dot
        product."""
        if measure == "sink_weight" or self.target.rotates or "plain" not in self.versions:
            return list(self.versions)
        return ["plain"]

    def _draw(
        self, name: str, curves: Mapping[str, tuple[str, list[Line]]], x_label: str, caption: str
    ) -> Plot:
        panels = [Panel(title, lines, y=y) for title, (y, lines) in curves.items()]
        figure = by_length(panels, x=x_label, trained=self.target.training_length)
        return Plot(name, figure, caption)
