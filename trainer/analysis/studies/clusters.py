"""Clusters of queries and keys by length, with and without the rotation (RoPE-ID Sec. 3.1, App. A.3
and A.10; Fig. 2, 3, 4, 10, 11, 13 and 14)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from trainer.analysis.capture import Heads
from trainer.analysis.clusters import ClusterResult, Clusters
from trainer.analysis.snapshots import Snapshot, snapshot
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.cluster_pictures import ClusterPictures
from trainer.analysis.studies.section import Grid, Indicator, Section
from trainer.analysis.studies.study import Study, Target
from trainer.analysis.studies.versions import before, versions

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
    """How tight the clouds of queries and keys are, how far apart, and what the rotation does."""

    key: ClassVar[str] = "clusters"
    title: ClassVar[str] = "Clusters of queries and keys"
    shortest: ClassVar[int] = 4  # clouds have points

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.clusters = Clusters(seed=target.seed)
        self.versions = versions(target)
        self._snapshots: list[Snapshot] = []
        inside = min(target.training_length, target.length)
        self._panels = list(dict.fromkeys([inside, target.length]))

    def on_layer(self, heads: Heads) -> None:
        """Measures of all heads, pictures of those that may be shown."""
        self.clusters.update(heads)
        for kv_head in self._pictured(heads):
            self._snapshots.append(
                snapshot(heads, kv_head, self._panels, points=POINTS, seed=self.target.seed)
            )

    def _pictured(self, heads: Heads) -> list[int]:
        if self.target.chosen:
            own = [head for layer, head in self.target.chosen if layer == heads.layer]
            return list(dict.fromkeys(head // heads.queries_per_key for head in own))
        return list(range(heads.k.shape[1])) if heads.layer in self.target.sampled_layers else []

    def section(self) -> Section:
        """Curves by length, distributions over heads, pictures of some."""
        found = self.clusters.result()
        pictures = ClusterPictures(found, self.versions, self.target.training_length)
        shown = self._shown(found)
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
            self._findings(found),
            (
                pictures.pairs("cosine"),
                *([pictures.snapshots(shown, which)] if shown else []),
                pictures.separation(self.clusters.points),
                pictures.singular_values(),
                pictures.first_component(),
                pictures.pairs("dot"),
            ),
            (self._table(pictures),),
            self._numbers(found),
        )

    @property
    def _within(self) -> int:
        """Index of the longest prefix within the training length."""
        inside = [i for i, n in enumerate(self.clusters.lengths) if self._is_within(n)]
        return max(inside, default=0)

    def _is_within(self, length: int) -> bool:
        return length <= self.target.training_length

    def _findings(self, found: ClusterResult) -> tuple[str, ...]:
        here, C = self._within, self.target.training_length
        shares = found.key_first_share, found.query_first_share
        said = [
            f"{before(self.versions).capitalize()} one direction holds "
            f"{100 * shares[0].mean():.0f}% of the "
            f"variance of keys and {100 * shares[1].mean():.0f}% of that of queries about the "
            f"origin, mean over heads (RoPE-ID: over 75% in Llama 3)."
        ]
        places = {found.lengths[i]: i for i in (here, -1)}
        for n, at in places.items():
            geometry = found.rotated
            cross = geometry.cross_cosine[..., at]
            said.append(
                f"At {n:,} tokens{'' if self._is_within(n) else f' ({n / C:g} C)'} the cosine "
                f"between queries and keys as they meet is {cross.mean():+.3f}, and below 0 in "
                f"{100 * (cross < 0).mean():.0f}% of {cross.size} heads; the silhouette score is "
                f"{geometry.silhouette[..., at].mean():.3f} and the stable rank of keys "
                f"{geometry.key_stable_rank[..., at].mean():.2f}."
            )
        if "plain" in self.versions:
            ratio = found.key_fsv_ratio.mean(axis=(0, 1))
            plain_rank, rank = (
                g.key_stable_rank.mean(axis=(0, 1)) for g in (found.plain, found.rotated)
            )
            said += [
                f"The rotation leaves {ratio[at]:.2f} of the first singular value of keys at "
                f"{n:,} tokens, mean over heads, and their stable rank is "
                f"{rank[at] / plain_rank[at]:.2f} times that before it."
                for n, at in places.items()
            ]
            said.append(
                "Theorem 1 expects at least 2 times in the limit, for keys along one direction "
                "all of whose channels rotate."
            )
        else:
            said.append(
                "No head rotates, so queries and keys meet as they were projected: whatever "
                "changes with length is in the states themselves."
            )
        return tuple(said)

    def _shown(self, found: ClusterResult) -> list[Snapshot]:
        """Those asked for, or the most, median and least harmed of all that were taken."""
        if self.target.chosen or len(self._snapshots) <= SHOWN:
            return self._snapshots
        group = found.rotated.silhouette.shape[1] // found.key_fsv_ratio.shape[1]

        def loss(one: Snapshot) -> float:
            own = slice(one.kv_head * group, (one.kv_head + 1) * group)
            layer = found.layers.index(one.layer)
            scores = found.rotated.silhouette[layer, own].mean(axis=0)
            return float(scores[-1] - scores[self._within])

        ordered = sorted(self._snapshots, key=loss)
        return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]

    def _table(self, pictures: ClusterPictures) -> Grid:
        lengths = pictures.found.lengths
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

    def _numbers(self, found: ClusterResult) -> dict[str, Any]:
        measures = list(type(found.plain).__annotations__)
        numbers: dict[str, Any] = {
            "lengths": found.lengths,
            "layers": found.layers,
            "training_length": self.target.training_length,
            **{
                version: {name: plain(getattr(getattr(found, version), name)) for name in measures}
                for version in ("plain", "rotated")
            },
            "key_fsv_ratio": plain(found.key_fsv_ratio),
            "query_fsv_ratio": plain(found.query_fsv_ratio),
            "key_first_share": plain(found.key_first_share),
            "query_first_share": plain(found.query_first_share),
        }
        return numbers | {"glance": [one.to_dict() for one in self._glance(found)]}

    def _glance(self, found: ClusterResult) -> list[Indicator]:
        lengths, C = found.lengths, self.target.training_length
        rank = found.rotated.key_stable_rank.mean(axis=(0, 1))
        name, meaning = "Stable rank of keys", "low: one tight cloud"
        if "plain" in self.versions:
            rank = rank / found.plain.key_stable_rank.mean(axis=(0, 1))
            name += ", after / before rotation"
            meaning = "1: the rotation leaves the cloud tight"
        separation = found.rotated.silhouette.mean(axis=(0, 1))
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
