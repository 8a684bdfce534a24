"""Clusters by length, before and after the rotation (RoPE-ID Sec. 3.1, App. A.3 and A.10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import SIDES, Array, Heads, Place, capture
from trainer.analysis.clusters import (
    MEASURES,
    Plane,
    Projection,
    cluster_measures,
    principal_plane,
    project,
)
from trainer.analysis.topic import Target, Topic, prefix_lengths, stacked, tidy, versions
from trainer.plotting.panels import (
    Panel,
    by_length,
    draw,
    histogram,
    log_if_wide,
    over_heads,
    plane,
)
from trainer.plotting.style import Plot

COMPARED = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
POINTS = 256
LENGTH = "length of the text (tokens)"


class ClusterFigures(Topic):
    """Width and distance of the clouds of queries and keys, before and after the rotation."""

    key = "clusters"
    title = "Clusters of queries and keys"
    shortest = 4  # a cloud needs several points

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.lengths = prefix_lengths(target.length)
        self.versions = versions(target)
        self.result: dict[str, Array] = {}
        self._layers: list[dict[str, Tensor]] = []
        self._within: list[dict[str, Tensor]] = []
        inside = min(target.training_length, target.length)
        self._shown = list(dict.fromkeys([inside, target.length]))
        self._clouds: dict[Place, tuple[Plane, dict[tuple[int, str], Projection]]] = {}

    def _on_layer(self, heads: Heads) -> None:
        """Measure all heads, and project the heads that may be shown."""
        self._layers.append(cluster_measures(heads, self.lengths))
        for kv_head in self._pictured(heads):
            plane = principal_plane(heads, kv_head, self._shown[0])
            self._clouds[heads.layer, kv_head] = plane, {}
            self._project(heads, kv_head, self._shown)

    def _on_prefix(self, heads: Heads) -> None:
        """Replace the measures and clouds within the training length."""
        lengths = [n for n in self.lengths if n <= heads.q.shape[2]]
        if lengths:
            values = cluster_measures(heads, lengths)
            by_length = {k: v for k, v in values.items() if not k.endswith("_first_share")}
            self._within.append(by_length)
        for layer, kv_head in self._clouds:
            if layer == heads.layer:
                self._project(heads, kv_head, self._shown[:1])

    def _project(self, heads: Heads, kv_head: int, lengths: Sequence[int]) -> None:
        plane, clouds = self._clouds[heads.layer, kv_head]
        for n, version in product(lengths, self.versions):
            rotated = version == "rotated"
            clouds[n, version] = project(heads, kv_head, plane, n, rotated=rotated, points=POINTS)

    def _pictured(self, heads: Heads) -> list[int]:
        """Return the key heads of a layer that are shown: the chosen ones, or the first one of the
        first, the middle and the last layer."""
        if self.target.config.chosen:
            chosen = [head for layer, head in self.target.config.chosen if layer == heads.layer]
            return list(dict.fromkeys(head // heads.queries_per_key for head in chosen))
        last = len(self.target.model.layout.layers) - 1
        return [0] if heads.layer in (0, last // 2, last) else []

    def measure(self) -> None:
        """Read the texts, and average over them."""
        capture(self.target.model, self.target.ids, self._on_layer)
        if self.target.prefix is not None:
            capture(self.target.model, self.target.prefix, self._on_prefix)
        self.result = stacked(self._layers, self._within)

    def plots(self) -> list[Plot]:
        """Draw curves by length, the first component, and clouds of some heads."""
        shares = {title: 100 * self.result[f"{side}_first_share"] for side, title in SIDES.items()}
        plots = [
            self._pairs("cosine", "mean cosine", "RoPE-ID, Fig. 2, 13"),
            self._draw(
                "clusters_separation",
                [
                    self._panel("silhouette score", "silhouette"),
                    # Medians: a head whose two clouds share a centre has an unbounded index.
                    self._panel(
                        "Davies–Bouldin index", "davies_bouldin", prepare=log_if_wide, median=True
                    ),
                ],
                "Separation of queries and keys by length, mean score, median index and 80% of "
                "heads (RoPE-ID, Fig. 11).",
            ),
            self._singular_values(),
            Plot(
                "clusters_first_component",
                histogram(shares, "variance of the first component (%)", low=0, high=100),
                "Heads by the share of the first principal component in the variance about the "
                "origin, before the encoding (RoPE-ID, Fig. 4).",
            ),
            self._pairs("dot", "mean dot product", "RoPE-ID, Fig. 10"),
        ]
        return [*plots, *([self._snapshots()] if self._clouds else [])]

    def rows(self) -> pd.DataFrame:
        """Return every measure of every head at every length."""
        places = {"length": self.lengths}
        axes = ("layer", "head", "length")
        tables = [
            tidy({m: self.result[f"{v}.{m}"]}, *axes, places=places, variant=v)
            for v in self.versions
            for m in MEASURES
        ]
        for side in SIDES:
            ratio = {f"{side}_fsv_ratio": self.result[f"{side}_fsv_ratio"]}
            if "plain" in self.versions:
                tables.append(tidy(ratio, *axes, places=places, variant="rotated / plain"))
            share = {f"{side}_first_share": self.result[f"{side}_first_share"]}
            tables.append(tidy(share, "layer", "head", variant="plain", length=self.target.length))
        return pd.concat(tables)

    def _panel(self, title: str, measure: str, *, median: bool = False, **others: Any) -> Panel:
        """Return the mean over heads of a measure by length, a line for each version."""
        curves = [
            over_heads(*look, self.lengths, self.result[f"{version}.{measure}"], median=median)
            for version, look in self.versions.items()
        ]
        return Panel(title, curves, **others)

    def _draw(self, name: str, panels: list[Panel], caption: str, **layout: Any) -> Plot:
        figure = by_length(panels, x=LENGTH, trained=self.target.training_length, **layout)
        return Plot(name, figure, caption)

    def _pairs(self, kind: str, label: str, source: str) -> Plot:
        """Draw means over pairs of vectors: ``kind`` is ``cosine`` or ``dot``."""
        panels = [
            self._panel(title, f"{side}_{kind}", y=label if side == "key" else "")
            for side, title in COMPARED.items()
        ]
        caption = f"{label.capitalize()} of all pairs by length, mean and 80% of heads ({source})."
        return self._draw(f"clusters_{kind}", panels, caption)

    def _singular_values(self) -> Plot:
        panels = [
            self._panel("keys", "key_stable_rank", y="stable rank"),
            self._panel("queries", "query_stable_rank"),
        ]
        for side, title in SIDES.items() if "plain" in self.versions else ():
            ratio = self.result[f"{side}_fsv_ratio"]
            mean = over_heads(*self.versions["rotated"], self.lengths, ratio)
            faint = ratio.reshape(-1, ratio.shape[-1])
            y = "after / before" if side == "key" else ""
            panels.append(Panel(f"{title}: first singular value", [mean], y=y, faint=faint))
        return self._draw(
            "clusters_singular_values",
            panels,
            "Stable rank, and first singular value after over before the rotation, by length; mean "
            "and 80% of heads, thin: each head (RoPE-ID, Fig. 4).",
            columns=2,
            height=2.0,
        )

    def _snapshots(self) -> Plot:
        """Draw some heads in the plane of their first two principal components."""
        panels = []
        for (layer, kv_head), (head_plane, clouds) in self._clouds.items():
            # The zero vector is the origin of the drawn plane.
            centre = head_plane.centre @ head_plane.axes
            drawn = [np.concatenate([p.keys[None], p.queries]) + centre for p in clouds.values()]
            everything = np.concatenate([cloud.reshape(-1, 2) for cloud in drawn])
            limits = square(everything.min(axis=0), everything.max(axis=0))
            group = len(drawn[0]) - 1
            names = ["keys", *(f"queries {i}" if group > 1 else "queries" for i in range(group))]
            for number, ((n, version), cloud) in enumerate(zip(clouds, drawn, strict=True)):
                rank = clouds[n, version].stable_rank
                panels.append(
                    Panel(
                        f"{self.versions[version][0]}\n{n:,} tokens, rank {rank:.2f}",
                        y="" if number else f"L{layer}, key head {kv_head}",
                        prepare=limits,
                        points=dict(zip(names, cloud, strict=True)),
                    )
                )
        return Plot(
            "clusters_snapshots",
            draw(panels, columns=len(panels) // len(self._clouds), height=1.9, size=3),
            "Keys and the queries that read them in the plane of their first two principal "
            "components, lines through the origin; a row a key head, with the stable rank of its "
            "keys (RoPE-ID, Fig. 3, 14).",
        )


def square(low: Array, high: Array) -> Callable[[Axes], None]:
    """Return a function that shows the plane from ``low`` to ``high`` ``[2]`` with one scale."""
    half, (x, y) = 0.55 * float((high - low).max()), (low + high) / 2

    def prepare(axes: Axes) -> None:
        plane(axes)
        axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half), box_aspect=1)
        axes.tick_params(labelleft=False, labelbottom=False, length=0)

    return prepare
