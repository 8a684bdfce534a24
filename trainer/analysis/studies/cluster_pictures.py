"""Figures of the clusters of queries and keys (RoPE-ID Fig. 2, 3, 4, 10, 11, 13 and 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.clusters import ClusterResult
from trainer.analysis.snapshots import Snapshot
from trainer.analysis.studies.section import Picture
from trainer.analysis.studies.versions import Versions, before
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, log_if_wide, over_heads
from trainer.plotting.points import GroupCloud, group_clouds, histogram

COSINES = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
LENGTH = "length of the text (tokens)"
Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class ClusterPictures:
    """``found`` in the versions that differ; ``trained``: the model's training length."""

    found: ClusterResult
    versions: Versions
    trained: int

    def values(self, version: str, measure: str) -> Array:
        """``[layers, heads, lengths]`` of a measure of :class:`Geometry`."""
        values: Array = getattr(getattr(self.found, version), measure)
        return values

    def lines(self, measure: str, *, median: bool = False) -> list[Series]:
        """A curve by length for each version."""
        return [
            over_heads(
                label, style, self.found.lengths, self.values(version, measure), median=median
            )
            for version, (label, style) in self.versions.items()
        ]

    def rows(self, names: Sequence[str], *, ratios: bool = False) -> Table:
        """Header and rows of a CSV file: every head at every length."""
        rows: list[tuple[Any, ...]] = []
        sets = [(v, name, self.values(v, name)) for v in self.versions for name in names]
        if ratios and "plain" in self.versions:
            sets += [("ratio", "key_fsv", self.found.key_fsv_ratio)]
            sets += [("ratio", "query_fsv", self.found.query_fsv_ratio)]
        for version, name, of in sets:
            rows += [
                (version, name, layer, head, self.found.lengths[i], float(value))
                for (layer, head, i), value in np.ndenumerate(of)
            ]
        return ("version", "measure", "layer", "head", "length", "value"), rows

    def pairs(self, kind: str) -> Picture:
        """``kind`` ``cosine`` (Fig. 2, 13) or ``dot`` (Fig. 10)."""
        names = [f"{side}_{kind}" for side in COSINES]
        label = {"cosine": "mean cosine", "dot": "mean dot product"}[kind]
        figure = by_length(
            [
                Panel(
                    title, self.lines(f"{side}_{kind}"), Frame("", label if side == "key" else "")
                )
                for side, title in COSINES.items()
            ],
            x_label=LENGTH,
            trained=self.trained,
        )
        reading = (
            "Near 1: a narrow cloud; between queries and keys, below 0: on opposite sides. Curves "
            "that bend at the training length say that a longer text is out of the distribution."
            if kind == "cosine"
            else "As above with the lengths of vectors in it: what enters the scores."
        )
        return Picture(
            f"clusters_{kind}",
            figure,
            f"{label.capitalize()} of all pairs within a head, by the length of the prefix. Line: "
            f"mean over heads; shaded: 80% of them. {reading}",
            *self.rows(names),
        )

    def singular_values(self) -> Picture:
        """Stable ranks and what the rotation leaves of first singular values (Fig. 4)."""
        panels = [
            Panel("keys", self.lines("key_stable_rank"), Frame("", "stable rank")),
            Panel("queries", self.lines("query_stable_rank"), Frame("", "")),
        ]
        names = ["key_stable_rank", "query_stable_rank"]
        caption = (
            "Stable rank of a head's keys and queries by the length of the prefix; mean and 80% of "
            "heads. Rising past the training length: the clouds spread around the origin."
        )
        if "plain" in self.versions:
            for side, of in (
                ("keys", self.found.key_fsv_ratio),
                ("queries", self.found.query_fsv_ratio),
            ):
                title, y = f"{side}: FSV ratio", "after / before" if side == "keys" else ""
                label, style = self.versions["rotated"]
                mean = over_heads(label, style, self.found.lengths, of)
                panels.append(Panel(title, [mean], Frame("", y), of.reshape(-1, of.shape[-1])))
            caption += (
                " Below: first singular value after the rotation over that before it, a thin line "
                "a head. 1: untouched; falling past the training length: the cloud's mean drifts "
                "to the origin."
            )
        figure = by_length(panels, x_label=LENGTH, trained=self.trained, columns=2, height=2.0)
        return Picture("clusters_singular_values", figure, caption, *self.rows(names, ratios=True))

    def first_component(self) -> Picture:
        """How much of the variance one direction holds (Fig. 4, left)."""
        shares = {
            "keys": 100 * self.found.key_first_share,
            "queries": 100 * self.found.query_first_share,
        }
        return Picture(
            "clusters_first_component",
            histogram(shares, "variance of the first component (%)", low=0, high=100),
            "Heads by the share of the first principal component in the variance about the origin, "
            f"{before(self.versions)}, over the whole text; dashed: the mean. Far right: a tight "
            "cloud away from the origin, or a needle through it.",
            ("side", "layer", "head", "share"),
            [
                (side, *at, float(value) / 100)
                for side, of in shares.items()
                for at, value in np.ndenumerate(of)
            ],
        )

    def separation(self, points: int) -> Picture:
        """Silhouette and Davies–Bouldin of samples of ``points`` a cloud (Fig. 11)."""
        # A head whose clouds share a centre has an index without bounds, and no mean.
        medians = self.lines("davies_bouldin", median=True)
        panels = [
            Panel("silhouette score", self.lines("silhouette"), Frame("", "")),
            Panel("Davies–Bouldin index", medians, Frame("", "", log_if_wide)),
        ]
        return Picture(
            "clusters_separation",
            by_length(panels, x_label=LENGTH, trained=self.trained),
            f"How well queries and keys are separated, from samples of up to {points} of each; "
            "mean of the score, median of the index, and 80% of heads. A falling score and a "
            "rising index: they overlap.",
            *self.rows(["silhouette", "davies_bouldin"]),
        )

    def snapshots(self, shown: Sequence[Snapshot], which: str) -> Picture:
        """Clouds in the plane of their first two components (Fig. 3, 14)."""
        rows: dict[str, list[GroupCloud]] = {}
        points: list[tuple[Any, ...]] = []
        for one in shown:
            group = one.panels[0].queries.shape[0]
            names = ["keys", *(f"queries {i}" if group > 1 else "queries" for i in range(group))]
            row = rows.setdefault(f"layer {one.layer}, key head {one.kv_head}", [])
            for panel in one.panels:
                version = "rotated" if panel.rotated else "plain"
                if version not in self.versions:
                    continue
                of = dict(zip(names, [panel.keys, *panel.queries], strict=True))
                title = f"{self.versions[version][0]}\n{panel.length:,} tokens"
                row.append(GroupCloud(f"{title} ({panel.stable_rank:.2f})", of, one.origin))
                points += [
                    (one.layer, one.kv_head, panel.length, version, name, int(at), *map(float, xy))
                    for name, cloud in of.items()
                    for at, xy in zip(panel.positions, cloud, strict=True)
                ]
        first = shown[0].panels[0]
        return Picture(
            "clusters_snapshots",
            group_clouds(rows),
            f"Keys and the queries that read them in {counted(len(rows), 'head')}, {which}. Every "
            f"row is one plane, that of the first two principal components at {first.length:,} "
            f"tokens {before(self.versions)}; a sample of {len(first.positions)} or more points a "
            "cloud; in brackets the stable rank of the keys.",
            ("layer", "kv_head", "length", "version", "group", "position", "x", "y"),
            points,
        )
