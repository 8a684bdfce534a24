"""The section on clusters of queries and keys by length, with and without the rotation (RoPE-ID
Sec. 3.1, App. A.3 and A.10; Fig. 2, 3, 4, 10, 11, 13 and 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import Heads
from trainer.analysis.clusters.measure import ClusterResult, Clusters, Snapshot, snapshot
from trainer.analysis.studies.section import Grid, Indicator, Picture, Section
from trainer.analysis.studies.study import Study, Target, Versions, before, versions
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, log_if_wide, over_heads
from trainer.plotting.points import GroupCloud, group_clouds, histogram

MEASURES = {
    "silhouette": "silhouette score (1: apart, 0: overlapping)",
    "davies_bouldin": "Davies–Bouldin index (low: apart), median",
    "key_cosine": "cosine, keys with keys",
    "query_cosine": "cosine, queries with queries",
    "cross_cosine": "cosine, queries with keys",
    "key_stable_rank": "stable rank of keys",
    "query_stable_rank": "stable rank of queries",
}
SHOWN, POINTS = 3, 256


class ClustersStudy(Study):
    """Width and distance of the clouds of queries and keys, before and after the rotation."""

    key: ClassVar[str] = "clusters"
    title: ClassVar[str] = "Clusters of queries and keys"
    shortest: ClassVar[int] = 4  # a cloud needs several points

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.clusters = Clusters(seed=target.seed)
        self.versions = versions(target)
        self._snapshots: list[Snapshot] = []
        inside = min(target.training_length, target.length)
        self._panels = list(dict.fromkeys([inside, target.length]))

    def on_layer(self, heads: Heads) -> None:
        """Measure all heads, and project the heads that may be shown."""
        self.clusters.update(heads)
        for kv_head in self._pictured(heads):
            self._snapshots.append(
                snapshot(heads, kv_head, self._panels, points=POINTS, seed=self.target.seed)
            )

    def _pictured(self, heads: Heads) -> list[int]:
        if self.target.chosen:
            chosen = [head for layer, head in self.target.chosen if layer == heads.layer]
            return list(dict.fromkeys(head // heads.queries_per_key for head in chosen))
        return list(range(heads.k.shape[1])) if heads.layer in self.target.sampled_layers else []

    def section(self) -> Section:
        """Write the section: curves by length, distributions over heads, pictures of some heads."""
        result = self.clusters.result()
        pictures = ClusterPictures(result, self.versions, self.target.training_length)
        shown = self._shown(result)
        which = (
            "as chosen"
            if self.target.chosen
            else "those whose separation suffers most, medium and least"
        )
        return Section(
            self.key,
            self.title,
            "A head's queries and its keys are two clouds of points. Cosines among keys, among "
            "queries and between both say how narrow each cloud is and whether they lie on "
            "opposite sides of the origin; silhouette score and Davies–Bouldin index say how well "
            "they are separated. The stable rank is about 1 for a tight cloud away from the "
            "origin and grows as the cloud spreads around it; it can at most be the number of "
            "channels of a head."
            + (
                " Both versions, before and after the rotation, come from the same forward pass "
                "of the model as it is."
                if self.target.rotates
                else ""
            ),
            (
                "cos(X, Y) = mean over pairs of ⟨x, y⟩ / (‖x‖ ‖y‖)",
                "srank(X) = ‖X‖²_F / ‖X‖²₂ = Σᵢ σᵢ² / σ₁²",
                *(["FSV ratio = σ₁(R X) / σ₁(X),  R: the rotation"] if self.target.rotates else []),
                "silhouette = mean of (b − a) / max(a, b),  a, b: mean distances to one's own and "
                "to the other cloud",
            ),
            "RoPE-ID (Frayed RoPE and Long Inputs), Sec. 3.1, App. A.3, A.10; Fig. 2, 3, 4, 10, "
            "11, 13, 14.",
            self._findings(result),
            (
                pictures.pairs("cosine"),
                *([pictures.snapshots(shown, which)] if shown else []),
                pictures.separation(self.clusters.points),
                pictures.singular_values(),
                pictures.first_component(),
                pictures.pairs("dot"),
            ),
            (self._table(pictures),),
            self._numbers(result),
        )

    @property
    def _within(self) -> int:
        """Index of the longest prefix within the training length."""
        inside = [i for i, n in enumerate(self.clusters.lengths) if self._is_within(n)]
        return max(inside, default=0)

    def _is_within(self, length: int) -> bool:
        return length <= self.target.training_length

    def _findings(self, result: ClusterResult) -> tuple[str, ...]:
        within, C = self._within, self.target.training_length
        shares = result.key_first_share, result.query_first_share
        findings = [
            f"{before(self.versions).capitalize()} one direction holds "
            f"{100 * shares[0].mean():.0f}% of the "
            f"variance of keys and {100 * shares[1].mean():.0f}% of that of queries about the "
            f"origin, mean over heads (RoPE-ID: over 75% in Llama 3)."
        ]
        places = {result.lengths[i]: i for i in (within, -1)}
        for n, at in places.items():
            geometry = result.rotated
            cross = geometry.cross_cosine[..., at]
            findings.append(
                f"At {n:,} tokens{'' if self._is_within(n) else f' ({n / C:g} C)'} the cosine "
                f"between queries and keys as they meet is {cross.mean():+.3f}, and below 0 in "
                f"{100 * (cross < 0).mean():.0f}% of {cross.size} heads; the silhouette score is "
                f"{geometry.silhouette[..., at].mean():.3f} and the stable rank of keys "
                f"{geometry.key_stable_rank[..., at].mean():.2f}."
            )
        if "plain" in self.versions:
            ratio = result.key_fsv_ratio.mean(axis=(0, 1))
            plain_rank, rank = (
                g.key_stable_rank.mean(axis=(0, 1)) for g in (result.plain, result.rotated)
            )
            findings += [
                f"The rotation leaves {ratio[at]:.2f} of the first singular value of keys at "
                f"{n:,} tokens, mean over heads, and their stable rank is "
                f"{rank[at] / plain_rank[at]:.2f} times that before it."
                for n, at in places.items()
            ]
            findings.append(
                "Theorem 1 expects at least 2 times in the limit, for keys along one direction "
                "all of whose channels rotate."
            )
        else:
            findings.append(
                "No head rotates, so queries and keys meet as they were projected: whatever "
                "changes with length is in the states themselves."
            )
        return tuple(findings)

    def _shown(self, result: ClusterResult) -> list[Snapshot]:
        """Return the chosen heads, or those whose separation suffers most, medium and least."""
        if self.target.chosen or len(self._snapshots) <= SHOWN:
            return self._snapshots
        group = result.rotated.silhouette.shape[1] // result.key_fsv_ratio.shape[1]

        def loss(one: Snapshot) -> float:
            query_heads = slice(one.kv_head * group, (one.kv_head + 1) * group)
            layer = result.layers.index(one.layer)
            scores = result.rotated.silhouette[layer, query_heads].mean(axis=0)
            return float(scores[-1] - scores[self._within])

        ordered = sorted(self._snapshots, key=loss)
        return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]

    def _table(self, pictures: ClusterPictures) -> Grid:
        lengths = pictures.result.lengths
        places = list(dict.fromkeys([self._within, len(lengths) - 1]))
        header = [
            f"{lengths[at]:,} tokens, {label}"
            for at in places
            for label, _ in self.versions.values()
        ]

        def value(version: str, measure: str, at: int) -> str:
            of = pictures.values(version, measure)[..., at]
            return f"{(np.median if measure == 'davies_bouldin' else np.mean)(of):.3f}"

        return Grid(
            "Queries and keys within the training length and at the longest one; means over heads.",
            ("measure", *header),
            [
                (text, *(value(v, measure, at) for at in places for v in self.versions))
                for measure, text in MEASURES.items()
            ],
        )

    def _numbers(self, result: ClusterResult) -> dict[str, Any]:
        measures = list(type(result.plain).__annotations__)
        numbers: dict[str, Any] = {
            "lengths": result.lengths,
            "layers": result.layers,
            "training_length": self.target.training_length,
            **{
                version: {
                    name: to_json(getattr(getattr(result, version), name)) for name in measures
                }
                for version in ("plain", "rotated")
            },
            "key_fsv_ratio": to_json(result.key_fsv_ratio),
            "query_fsv_ratio": to_json(result.query_fsv_ratio),
            "key_first_share": to_json(result.key_first_share),
            "query_first_share": to_json(result.query_first_share),
        }
        return numbers | {"glance": [one.to_dict() for one in self._glance(result)]}

    def _glance(self, result: ClusterResult) -> list[Indicator]:
        lengths, C = result.lengths, self.target.training_length
        rank = result.rotated.key_stable_rank.mean(axis=(0, 1))
        name, meaning = "Stable rank of keys", "low: one tight cloud"
        if "plain" in self.versions:
            rank = rank / result.plain.key_stable_rank.mean(axis=(0, 1))
            name += ", after / before rotation"
            meaning = "1: the rotation leaves the cloud tight"
        separation = result.rotated.silhouette.mean(axis=(0, 1))
        return [
            Indicator(
                "Separation of keys and queries",
                lengths,
                separation.tolist(),
                C,
                "high",
                "silhouette score; 0: they overlap",
            ),
            Indicator(name, lengths, rank.tolist(), C, "low", meaning),
        ]


COSINES = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
LENGTH = "length of the text (tokens)"
Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class ClusterPictures:
    """Draws ``result`` in the versions that differ; ``trained``: the model's training length."""

    result: ClusterResult
    versions: Versions
    trained: int

    def values(self, version: str, measure: str) -> Array:
        """Return a measure of :class:`Geometry` for one version, ``[layers, heads, lengths]``."""
        values: Array = getattr(getattr(self.result, version), measure)
        return values

    def lines(self, measure: str, *, median: bool = False) -> list[Series]:
        """Return a curve by length for each version."""
        return [
            over_heads(
                label, style, self.result.lengths, self.values(version, measure), median=median
            )
            for version, (label, style) in self.versions.items()
        ]

    def rows(self, names: Sequence[str], *, ratios: bool = False) -> Table:
        """Return header and rows of a CSV file: every head at every length."""
        rows: list[tuple[Any, ...]] = []
        sets = [(v, name, self.values(v, name)) for v in self.versions for name in names]
        if ratios and "plain" in self.versions:
            sets += [("ratio", "key_fsv", self.result.key_fsv_ratio)]
            sets += [("ratio", "query_fsv", self.result.query_fsv_ratio)]
        for version, name, of in sets:
            rows += [
                (version, name, layer, head, self.result.lengths[i], float(value))
                for (layer, head, i), value in np.ndenumerate(of)
            ]
        return ("version", "measure", "layer", "head", "length", "value"), rows

    def pairs(self, kind: str) -> Picture:
        """Draw means over pairs of vectors: ``kind`` is ``cosine`` (Fig. 2, 13) or ``dot`` (Fig.
        10)."""
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
        """Draw stable ranks and the ratios of first singular values after the rotation (Fig. 4)."""
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
                ("keys", self.result.key_fsv_ratio),
                ("queries", self.result.query_fsv_ratio),
            ):
                title, y = f"{side}: FSV ratio", "after / before" if side == "keys" else ""
                label, style = self.versions["rotated"]
                mean = over_heads(label, style, self.result.lengths, of)
                panels.append(Panel(title, [mean], Frame("", y), of.reshape(-1, of.shape[-1])))
            caption += (
                " Below: first singular value after the rotation over that before it, a thin line "
                "a head. 1: untouched; falling past the training length: the cloud's mean drifts "
                "to the origin."
            )
        figure = by_length(panels, x_label=LENGTH, trained=self.trained, columns=2, height=2.0)
        return Picture("clusters_singular_values", figure, caption, *self.rows(names, ratios=True))

    def first_component(self) -> Picture:
        """Draw the share of the variance that lies along one direction (Fig. 4, left)."""
        shares = {
            "keys": 100 * self.result.key_first_share,
            "queries": 100 * self.result.query_first_share,
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
        """Draw silhouette score and Davies–Bouldin index of samples of ``points`` a cloud (Fig.
        11)."""
        # Medians: a head whose two clouds share a centre has an unbounded index.
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
        """Draw clouds in the plane of their first two principal components (Fig. 3, 14)."""
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
