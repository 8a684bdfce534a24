"""The section on clusters of queries and keys by length, with and without the rotation (RoPE-ID
Sec. 3.1, App. A.3 and A.10; Fig. 2, 3, 4, 10, 11, 13 and 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import Heads
from trainer.analysis.clusters.measure import MEASURES, Clusters, Snapshot, snapshot
from trainer.analysis.studies.section import (
    Grid,
    Indicator,
    Picture,
    Rows,
    Section,
    last_within,
    long_rows,
)
from trainer.analysis.studies.study import Study, Target, before, extremes, versions
from trainer.common.words import counted
from trainer.plotting.lines import Frame, Panel, Series, by_length, log_if_wide, over_heads
from trainer.plotting.points import GroupCloud, group_clouds, histogram

TITLES = {
    "silhouette": "silhouette score (1: apart, 0: overlapping)",
    "davies_bouldin": "Davies–Bouldin index (low: apart), median",
    "key_cosine": "cosine, keys with keys",
    "query_cosine": "cosine, queries with queries",
    "cross_cosine": "cosine, queries with keys",
    "key_stable_rank": "stable rank of keys",
    "query_stable_rank": "stable rank of queries",
}
SIDES = {"key": "keys", "query": "queries"}
COMPARED = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
POINTS = 256
HEADER = ("version", "measure", "layer", "head", "length", "value")


class ClustersStudy(Study):
    """Width and distance of the clouds of queries and keys, before and after the rotation.

    ``result``: see :meth:`Clusters.result`.
    """

    key: ClassVar[str] = "clusters"
    title: ClassVar[str] = "Clusters of queries and keys"
    shortest: ClassVar[int] = 4  # a cloud needs several points

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

    def section(self) -> Section:
        """Write the section: curves by length, distributions over heads, pictures of some heads."""
        self.result = self.clusters.result()
        pictures = [
            self._pairs("cosine"),
            *([self._clouds()] if self._snapshots else []),
            self._separation(),
            self._singular_values(),
            self._first_component(),
            self._pairs("dot"),
        ]
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "A head's queries and its keys are two clouds of points. Cosines among keys, among "
                "queries and between both say how narrow each cloud is and whether they lie on "
                "opposite sides of the origin; silhouette score and Davies–Bouldin index say how "
                "well they are separated. The stable rank is about 1 for a tight cloud away from "
                "the origin and grows as the cloud spreads around it, up to the number of channels "
                "of a head."
                + (
                    " Both versions, before and after the rotation, come from the same forward "
                    "pass of the model as it is."
                    if self.target.rotates
                    else ""
                )
            ),
            formula=(
                "cos(X, Y) = mean over pairs of ⟨x, y⟩ / (‖x‖ ‖y‖)",
                "srank(X) = ‖X‖²_F / ‖X‖²₂ = Σᵢ σᵢ² / σ₁²",
                *(["FSV ratio = σ₁(R X) / σ₁(X),  R: the rotation"] if self.target.rotates else []),
                "silhouette = mean of (b − a) / max(a, b),  a, b: mean distances to one's own and "
                "to the other cloud",
            ),
            source=(
                "RoPE-ID (Frayed RoPE and Long Inputs), Sec. 3.1, App. A.3, A.10; Fig. 2, 3, 4, "
                "10, 11, 13, 14."
            ),
            findings=tuple(self._findings()),
            pictures=tuple(pictures),
            grids=(self._table(),),
            numbers=self._numbers(),
        )

    def _places(self) -> dict[int, int]:
        """Return the longest prefix within the training length and the longest one, with the index
        of each."""
        lengths = self.clusters.lengths
        within = last_within(lengths, self.target.training_length)
        return {lengths[index]: index for index in (within, len(lengths) - 1)}

    def _findings(self) -> list[str]:
        C, result = self.target.training_length, self.result
        keys, queries = (100 * result[f"{side}_first_share"].mean() for side in SIDES)
        findings = [
            f"{before(self.versions).capitalize()} one direction holds {keys:.0f}% of the variance "
            f"of keys and {queries:.0f}% of the variance of queries about the origin, mean over "
            "heads (RoPE-ID: over 75% in Llama 3)."
        ]
        for n, index in self._places().items():
            cross, silhouette, rank = (
                result[f"rotated.{name}"][..., index]
                for name in ("cross_cosine", "silhouette", "key_stable_rank")
            )
            findings.append(
                f"At {n:,} tokens{'' if n <= C else f' ({n / C:g} C)'} the cosine "
                f"between queries and keys as they meet is {cross.mean():+.3f}, and below 0 in "
                f"{100 * (cross < 0).mean():.0f}% of {cross.size} heads; the silhouette score is "
                f"{silhouette.mean():.3f} and the stable rank of keys {rank.mean():.2f}."
            )
        if "plain" not in self.versions:
            findings.append(
                "No head rotates, so queries and keys meet as they were projected: whatever "
                "changes with length is in the states themselves."
            )
            return findings
        ratio, plain, rotated = (
            result[name].mean(axis=(0, 1))
            for name in ("key_fsv_ratio", "plain.key_stable_rank", "rotated.key_stable_rank")
        )
        findings += [
            f"The rotation leaves {ratio[index]:.2f} of the first singular value of keys at "
            f"{n:,} tokens, mean over heads, and multiplies their stable rank by "
            f"{rotated[index] / plain[index]:.2f}."
            for n, index in self._places().items()
        ]
        findings.append(
            "Theorem 1 expects at least 2 times in the limit, for keys along one direction "
            "all of whose channels rotate."
        )
        return findings

    def _table(self) -> Grid:
        def value(version: str, measure: str, index: int) -> str:
            values = self.result[f"{version}.{measure}"][..., index]
            return f"{(np.median if measure == 'davies_bouldin' else np.mean)(values):.3f}"

        columns = [
            (n, index, version) for n, index in self._places().items() for version in self.versions
        ]
        return Grid(
            caption=(
                "Queries and keys within the training length and at the longest one; means over "
                "heads."
            ),
            header=("measure", *(f"{n:,} tokens, {self.versions[v][0]}" for n, _, v in columns)),
            rows=[
                (title, *(value(version, measure, index) for _, index, version in columns))
                for measure, title in TITLES.items()
            ],
        )

    def _numbers(self) -> dict[str, Any]:
        lists = {name: to_json(values) for name, values in self.result.items()}
        ratios = [f"{side}_{name}" for name in ("fsv_ratio", "first_share") for side in SIDES]
        return {
            "lengths": self.clusters.lengths,
            "layers": self.clusters.averages.layers,
            "training_length": self.target.training_length,
            **{
                version: {measure: lists[f"{version}.{measure}"] for measure in MEASURES}
                for version in ("plain", "rotated")
            },
            **{name: lists[name] for name in ratios},
            "glance": [indicator.to_dict() for indicator in self._glance()],
        }

    def _glance(self) -> list[Indicator]:
        lengths, C = self.clusters.lengths, self.target.training_length
        separation, rank, plain = (
            self.result[name].mean(axis=(0, 1))
            for name in ("rotated.silhouette", "rotated.key_stable_rank", "plain.key_stable_rank")
        )
        name, meaning = "Stable rank of keys", "low: one tight cloud"
        if "plain" in self.versions:
            rank = rank / plain
            name += ", after / before rotation"
            meaning = "1: the rotation leaves the cloud tight"
        return [
            Indicator(
                *("Separation of keys and queries", lengths, separation.tolist(), C),
                *("high", "silhouette score; 0: they overlap"),
            ),
            Indicator(name, lengths, rank.tolist(), C, "low", meaning),
        ]

    def _pairs(self, kind: str) -> Picture:
        """Draw means over pairs of vectors: ``kind`` is ``cosine`` (Fig. 2, 13) or ``dot`` (Fig.
        10)."""
        label = {"cosine": "mean cosine", "dot": "mean dot product"}[kind]
        panels = [
            Panel(title, self._lines(f"{side}_{kind}"), Frame("", label if side == "key" else ""))
            for side, title in COMPARED.items()
        ]
        reading = (
            "Near 1: a narrow cloud; between queries and keys, below 0: on opposite sides. Curves "
            "that bend at the training length say that a longer text is out of the distribution."
            if kind == "cosine"
            else "As above with the lengths of vectors in it: what enters the scores."
        )
        return Picture(
            name=f"clusters_{kind}",
            figure=self._by_length(panels),
            caption=(
                f"{label.capitalize()} of all pairs within a head, by the length of the prefix. "
                f"Line: mean over heads; shaded: 80% of them. {reading}"
            ),
            header=HEADER,
            rows=self._rows(*(f"{side}_{kind}" for side in COMPARED)),
        )

    def _singular_values(self) -> Picture:
        """Draw stable ranks and the ratios of first singular values after the rotation (Fig. 4)."""
        ranks, ratios = (
            [f"{side}_{name}" for side in SIDES] for name in ("stable_rank", "fsv_ratio")
        )
        panels = [
            Panel("keys", self._lines(ranks[0]), Frame("", "stable rank")),
            Panel("queries", self._lines(ranks[1]), Frame("", "")),
        ]
        rows = self._rows(*ranks)
        caption = (
            "Stable rank of a head's keys and queries by the length of the prefix; mean and 80% of "
            "heads. Rising past the training length: the clouds spread around the origin."
        )
        if "plain" in self.versions:
            for name, side, y_label in zip(
                ratios, SIDES.values(), ("after / before", ""), strict=True
            ):
                ratio = self.result[name]
                mean = over_heads(*self.versions["rotated"], self.clusters.lengths, ratio)
                heads = ratio.reshape(-1, ratio.shape[-1])
                panels.append(Panel(f"{side}: FSV ratio", [mean], Frame("", y_label), heads))
                key = ("ratio", name.removesuffix("_ratio"))
                rows += long_rows({key: ratio}, places=self.clusters.lengths)
            caption += (
                " Below: first singular value after the rotation over that before it, a thin line "
                "a head. 1: untouched; falling past the training length: the cloud's mean drifts "
                "to the origin."
            )
        figure = self._by_length(panels, columns=2, height=2.0)
        return Picture(
            name="clusters_singular_values",
            figure=figure,
            caption=caption,
            header=HEADER,
            rows=rows,
        )

    def _first_component(self) -> Picture:
        """Draw the share of the variance that lies along one direction (Fig. 4, left)."""
        shares = {title: 100 * self.result[f"{side}_first_share"] for side, title in SIDES.items()}
        return Picture(
            name="clusters_first_component",
            figure=histogram(shares, "variance of the first component (%)", low=0, high=100),
            caption=(
                "Heads by the share of the first principal component in the variance about the "
                f"origin, {before(self.versions)}, over the whole text; dashed: the mean. Far "
                "right: a tight cloud away from the origin, or a needle through it."
            ),
            header=("side", "layer", "head", "share"),
            rows=long_rows({(title,): share / 100 for title, share in shares.items()}),
        )

    def _separation(self) -> Picture:
        """Draw silhouette score and Davies–Bouldin index of samples (Fig. 11)."""
        # Medians: a head whose two clouds share a centre has an unbounded index.
        medians = self._lines("davies_bouldin", median=True)
        panels = [
            Panel("silhouette score", self._lines("silhouette"), Frame("", "")),
            Panel("Davies–Bouldin index", medians, Frame("", "", log_if_wide)),
        ]
        return Picture(
            name="clusters_separation",
            figure=self._by_length(panels),
            caption=(
                "How well queries and keys are separated, from samples of up to "
                f"{self.clusters.points} of each; mean of the score, median of the index, and 80% "
                "of heads. A falling score and a rising index: they overlap."
            ),
            header=HEADER,
            rows=self._rows("silhouette", "davies_bouldin"),
        )

    def _clouds(self) -> Picture:
        """Draw the clouds of some heads in the plane of their first two principal components (Fig.
        3, 14)."""
        shown, choice = self._snapshots, "as chosen"
        if not self.target.chosen:
            shown = extremes(shown, key=self._lost_separation)
            choice = "those whose separation suffers most, medium and least"
        rows: dict[str, list[GroupCloud]] = {}
        points: Rows = []
        for head in shown:
            group = head.panels[0].queries.shape[0]
            names = ["keys", *(f"queries {i}" if group > 1 else "queries" for i in range(group))]
            row = rows.setdefault(f"layer {head.layer}, key head {head.kv_head}", [])
            for panel in head.panels:
                version = "rotated" if panel.rotated else "plain"
                if version not in self.versions:
                    continue
                groups = dict(zip(names, [panel.keys, *panel.queries], strict=True))
                title = f"{self.versions[version][0]}\n{panel.length:,} tokens"
                row.append(GroupCloud(f"{title} ({panel.stable_rank:.2f})", groups, head.origin))
                points += [
                    (head.layer, head.kv_head, panel.length, version, name, position, *xy)
                    for name, cloud in groups.items()
                    for position, xy in zip(panel.positions.tolist(), cloud.tolist(), strict=True)
                ]
        first = shown[0].panels[0]
        return Picture(
            name="clusters_snapshots",
            figure=group_clouds(rows),
            caption=(
                f"Keys and the queries that read them in {counted(len(rows), 'head')}, {choice}. "
                "Every row is one plane, spanned by the first two principal components at "
                f"{first.length:,} tokens {before(self.versions)}; a sample of "
                f"{len(first.positions)} or more points a cloud; in brackets the stable rank of "
                "the keys."
            ),
            header=("layer", "kv_head", "length", "version", "group", "position", "x", "y"),
            rows=points,
        )

    def _lost_separation(self, head: Snapshot) -> float:
        """Return how a head's silhouette score changes past the training length."""
        scores = self.result["rotated.silhouette"][self.clusters.averages.layers.index(head.layer)]
        group = len(scores) // self.result["key_fsv_ratio"].shape[1]
        mean = scores[head.kv_head * group : (head.kv_head + 1) * group].mean(axis=0)
        within, *_ = self._places().values()
        return float(mean[-1] - mean[within])

    def _lines(self, measure: str, *, median: bool = False) -> list[Series]:
        lengths = self.clusters.lengths
        return [
            over_heads(*look, lengths, self.result[f"{version}.{measure}"], median=median)
            for version, look in self.versions.items()
        ]

    def _by_length(self, panels: Sequence[Panel], **layout: Any) -> Figure:
        trained = self.target.training_length
        return by_length(panels, x_label="length of the text (tokens)", trained=trained, **layout)

    def _rows(self, *measures: str) -> Rows:
        """Return every head's measures at every length."""
        values = {
            (version, measure): self.result[f"{version}.{measure}"]
            for version in self.versions
            for measure in measures
        }
        return long_rows(values, places=self.clusters.lengths)
