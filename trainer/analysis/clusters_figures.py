"""Clusters by length, before and after the rotation (RoPE-ID Sec. 3.1, App. A.3 and A.10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from trainer.analysis.arrays import Array
from trainer.analysis.capture import Heads
from trainer.analysis.clusters import MEASURES, Clusters, Snapshot, snapshot
from trainer.analysis.topic import Plot, Target, Topic, extremes, tidy, versions
from trainer.plotting.lines import Frame, Panel, by_length, log_if_wide, over_heads, unscaled
from trainer.plotting.points import Points, histogram, plane, points

SIDES = {"key": "keys", "query": "queries"}
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
        self.clusters = Clusters(seed=target.seed)
        self.versions = versions(target)
        self.result: dict[str, Array] = {}
        self._snapshots: list[Snapshot] = []
        inside = min(target.training_length, target.length)
        self._prefixes = list(dict.fromkeys([inside, target.length]))

    def on_layer(self, heads: Heads) -> None:
        """Measure all heads, and project the heads that may be shown."""
        self.clusters.update(heads)
        for kv_head in self._pictured(heads):
            self._snapshots.append(
                snapshot(heads, kv_head, self._prefixes, points=POINTS, seed=self.target.seed)
            )

    def on_prefix(self, heads: Heads) -> None:
        """Replace the measures and panels within the training length."""
        self.clusters.update_prefix(heads)
        inside, seed = self._prefixes[:1], self.target.seed
        for index, shown in enumerate(self._snapshots):
            if shown.layer == heads.layer:
                within = snapshot(
                    heads, shown.kv_head, inside, points=POINTS, seed=seed, plane_of=shown
                )
                panels = within.panels + shown.panels[len(within.panels) :]
                self._snapshots[index] = replace(shown, panels=panels)

    def _pictured(self, heads: Heads) -> list[int]:
        if self.target.chosen:
            chosen = [head for layer, head in self.target.chosen if layer == heads.layer]
            return list(dict.fromkeys(head // heads.queries_per_key for head in chosen))
        return list(range(heads.k.shape[1])) if heads.layer in self.target.sampled_layers else []

    def finish(self) -> None:
        """Average over the texts."""
        self.result = self.clusters.result()

    def plots(self) -> list[Plot]:
        """Draw curves by length, the first component, and clouds of some heads."""
        shares = {title: 100 * self.result[f"{side}_first_share"] for side, title in SIDES.items()}
        plots = [
            self._pairs("cosine", "RoPE-ID, Fig. 2, 13"),
            self._separation(),
            self._singular_values(),
            Plot(
                "clusters_first_component",
                histogram(shares, "variance of the first component (%)", low=0, high=100),
                "Heads by the share of the first principal component in the variance about the "
                "origin, before the encoding (RoPE-ID, Fig. 4).",
            ),
            self._pairs("dot", "RoPE-ID, Fig. 10"),
        ]
        return [*plots, *([self._clouds()] if self._snapshots else [])]

    def rows(self) -> pd.DataFrame:
        """Return every measure of every head at every length."""
        places = {"length": self.clusters.lengths}
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

    def _panel(
        self,
        title: str,
        measure: str,
        y_label: str = "",
        prepare: Callable[[Axes], None] = unscaled,
        *,
        median: bool = False,
    ) -> Panel:
        """Return the mean over heads of a measure by length, a line for each version."""
        lengths = self.clusters.lengths
        curves = [
            over_heads(*look, lengths, self.result[f"{version}.{measure}"], median=median)
            for version, look in self.versions.items()
        ]
        return Panel(title, curves, Frame("", y_label, prepare))

    def _draw(self, name: str, panels: list[Panel], caption: str, **layout: Any) -> Plot:
        figure = by_length(panels, x_label=LENGTH, trained=self.target.training_length, **layout)
        return Plot(name, figure, caption)

    def _pairs(self, kind: str, source: str) -> Plot:
        """Draw means over pairs of vectors: ``kind`` is ``cosine`` or ``dot``."""
        label = {"cosine": "mean cosine", "dot": "mean dot product"}[kind]
        panels = [
            self._panel(title, f"{side}_{kind}", label if side == "key" else "")
            for side, title in COMPARED.items()
        ]
        caption = f"{label.capitalize()} of all pairs by length, mean and 80% of heads ({source})."
        return self._draw(f"clusters_{kind}", panels, caption)

    def _separation(self) -> Plot:
        # Medians: a head whose two clouds share a centre has an unbounded index.
        panels = [
            self._panel("silhouette score", "silhouette"),
            self._panel("Davies–Bouldin index", "davies_bouldin", "", log_if_wide, median=True),
        ]
        return self._draw(
            "clusters_separation",
            panels,
            "Separation of queries and keys by length, mean score, median index and 80% of heads "
            "(RoPE-ID, Fig. 11).",
        )

    def _singular_values(self) -> Plot:
        panels = [
            self._panel("keys", "key_stable_rank", "stable rank"),
            self._panel("queries", "query_stable_rank"),
        ]
        if "plain" in self.versions:
            for side, title in SIDES.items():
                ratio = self.result[f"{side}_fsv_ratio"]
                mean = over_heads(*self.versions["rotated"], self.clusters.lengths, ratio)
                frame = Frame("", "after / before" if side == "key" else "")
                heads = ratio.reshape(-1, ratio.shape[-1])
                panels.append(Panel(f"{title}: first singular value", [mean], frame, heads))
        return self._draw(
            "clusters_singular_values",
            panels,
            "Stable rank, and first singular value after over before the rotation, by length; mean "
            "and 80% of heads, thin: each head (RoPE-ID, Fig. 4).",
            columns=2,
            height=2.0,
        )

    def _clouds(self) -> Plot:
        """Draw some heads in the plane of their first two principal components."""
        shown = self._snapshots
        if not self.target.chosen:
            shown = extremes(shown, key=self._lost_separation)
        panels = []
        for head in shown:
            drawn = [
                p for p in head.panels if ("rotated" if p.rotated else "plain") in self.versions
            ]
            group = drawn[0].queries.shape[0]
            names = ["keys", *(f"queries {i}" if group > 1 else "queries" for i in range(group))]
            # The zero vector is the origin of the drawn plane.
            centre = head.centre @ head.plane
            clouds = [[cloud + centre for cloud in (p.keys, *p.queries)] for p in drawn]
            everything = np.concatenate([cloud for row in clouds for cloud in row])
            low, high = everything.min(axis=0), everything.max(axis=0)
            limits = plane(0.55 * float((high - low).max()), (low + high) / 2)
            for number, (p, groups) in enumerate(zip(drawn, clouds, strict=True)):
                version = self.versions["rotated" if p.rotated else "plain"][0]
                panels.append(
                    Points(
                        f"{version}\n{p.length:,} tokens, rank {p.stable_rank:.2f}",
                        dict(zip(names, groups, strict=True)),
                        Frame(
                            "", "" if number else f"L{head.layer}, key head {head.kv_head}", limits
                        ),
                    )
                )
        columns = len(panels) // len(shown)
        return Plot(
            "clusters_snapshots",
            points(panels, columns=columns, height=1.9, size=3),
            "Keys and the queries that read them in the plane of their first two principal "
            "components, lines through the origin; a row a key head, with the stable rank of its "
            "keys (RoPE-ID, Fig. 3, 14).",
        )

    def _lost_separation(self, head: Snapshot) -> float:
        """Return how a head's silhouette score changes past the training length."""
        scores = self.result["rotated.silhouette"][self.clusters.averages.layers.index(head.layer)]
        group = len(scores) // self.result["key_fsv_ratio"].shape[1]
        mean = scores[head.kv_head * group : (head.kv_head + 1) * group].mean(axis=0)
        within = [n for n in self.clusters.lengths if n <= self.target.training_length]
        return float(mean[-1] - mean[max(len(within) - 1, 0)])
