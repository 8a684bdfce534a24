"""Rotary offset features of a model: where its mean queries and keys are large, and whether the
bounds predict it (Rotary Offset Features, Table 2, Fig. 4 to 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.angle_stability import AngleStability
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features import (
    COLUMNS,
    RADII,
    TURN,
    OffsetFeatures,
    PairPoints,
    bounds,
    contributions,
    pair_points,
)
from trainer.analysis.studies.angle_pictures import stable_angles, steadier
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.extended_bounds import AS_TRAINED, ExtendedBounds, number, percent
from trainer.analysis.studies.study import Study, Target
from trainer.report.geometry.offset_figures import (
    Cloud,
    by_distance,
    clouds,
    radius_and_angle,
)
from trainer.report.geometry.section import Grid, Picture, Section

SHOWN, CURVES, DISTANCES, POINTS = 3, 3, 400, 1000


@dataclass(frozen=True)
class Feature:
    """A pair of large means: ``strength`` is the product of their lengths, ``turned`` the angle
    that it turns in the training length, radians."""

    strength: float
    turned: float
    points: PairPoints

    @property
    def name(self) -> str:
        """Layer, head and pair."""
        return f"L{self.points.layer}H{self.points.head}, pair {self.points.pair}"


class OffsetFeaturesStudy(Study):
    """Radii and angles of every pair, their bounds, and these bounds at a longer length."""

    key: ClassVar[str] = "offset_features"
    title: ClassVar[str] = "Rotary offset features"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._extended = ExtendedBounds(target)
        self._features: list[Feature] = []
        self._stability = AngleStability()

    @classmethod
    def problems(cls, target: Target) -> list[str]:
        """Without a rotation there are no pairs."""
        if any(spectrum.rotates for spectrum in target.model.layout.spectra):
            return []
        return ["expected a model with a rotary encoding, got one without rotation in any head."]

    def on_layer(self, heads: Heads) -> None:
        """Means of all pairs; the points of the strongest one, of all heads or of chosen ones."""
        # Once for all: the temporary float64 copies of a layer leave holes in memory.
        means = replace(
            heads,
            q=heads.q.mean(dim=2, keepdim=True, dtype=torch.float64),
            k=heads.k.mean(dim=2, keepdim=True, dtype=torch.float64),
        )
        self._extended.update(means)
        self._stability.update(heads)
        if self.target.chosen:
            groups = [[head] for layer, head in self.target.chosen if layer == heads.layer]
        else:
            groups = [list(range(heads.q.shape[1]))]
        for group in groups:
            found = [one for head in group if (one := self._strongest(means, head))]
            if found:
                strength, turned, head, pair = max(found)
                self._features.append(Feature(strength, turned, pair_points(heads, head, pair)))

    def _strongest(self, means: Heads, head: int) -> tuple[float, float, int, int] | None:
        """Strength, turn, head and index of the pair of longest means under the upper bound."""
        C, kv = self.target.training_length, head // means.queries_per_key
        known = bounds(means.encoding.spectra[kv].at(C, C), C)
        if not known.possible.any():
            return None
        pairs = len(known.possible)
        size = _radii(means.q[:, head], pairs) * _radii(means.k[:, kv], pairs)
        pair = int(np.where(known.possible, size, -1).argmax())
        return float(size[pair]), float(known.inv_freq[pair] * C), head, pair

    def section(self) -> Section:
        """Scatter plot, clouds, curves by distance, and both tables."""
        results = self._extended.results()
        found = results[AS_TRAINED]
        shown = sorted(self._features, key=lambda one: -one.strength)[:SHOWN]
        stability = self._stability.result()
        pictures = [_scatter(found), stable_angles(stability)]
        if shown:
            pictures += [self._clouds(shown), _curves(found, shown)]
        return Section(
            self.key,
            self.title,
            "A pair whose queries and keys have long means adds a part to the logit that depends "
            "on the distance alone. It is an offset feature when that part stays below its value "
            "at distance 0 up to the context length C: then it turns less than once in C (the "
            "upper bound on its frequency), and the angle from query to key is large enough (the "
            "lower bound). The radius is the length of the mean key; means are over all positions, "
            "before the rotation.",
            (
                "part(δ) = |q̄| |k̄| cos(φ − θ δ) / √D",
                "upper bound: θ < 2π / C",
                "lower bound: φ ≥ π + θ C / 2",
            ),
            "Rotary Offset Features in Large Language Models, Eq. 13–16, Table 2, Fig. 2 and 4–8, "
            "App. C.",
            (*_findings(found, shown), *steadier(stability), *self._extended.findings(results)),
            (*pictures, self._extended.picture(found)),
            (_table(found), self._extended.grid(results)),
            {
                "context_length": found.context_length,
                "extended_length": self._extended.length,
                "methods": {
                    name: {
                        "share": one.share,
                        "mean_lower_bound": one.mean_lower_bound,
                        "recall": [asdict(recall) for recall in one.recall],
                    }
                    for name, one in results.items()
                },
                "features": {name: plain(getattr(found, name)) for name in COLUMNS},
            },
        )

    def _clouds(self, shown: list[Feature]) -> Picture:
        step = -(-self.target.length // POINTS)
        panels = [
            Cloud(one.name, one.points.query[::step], one.points.key[::step], one.turned)
            for one in shown
        ]
        return Picture(
            "offset_feature_points",
            clouds(panels),
            "Queries and keys of the strongest pairs under the upper bound, before the rotation, a "
            f"point for {'each token' if step == 1 else f'one in {step} tokens'}; arrows: the mean "
            "query and key, green: how far the query turns within the training length. Single keys "
            "far from the others, towards the queries, are attention sinks.",
            ("layer", "head", "pair", "token", "query_1", "query_2", "key_1", "key_2"),
            [
                (one.points.layer, one.points.head, one.points.pair, i * step, *map(float, values))
                for one, panel in zip(shown, panels, strict=True)
                for i, values in enumerate(np.hstack([panel.query, panel.key]))
            ],
        )


def _radii(x: Tensor, pairs: int) -> Array:
    """Lengths of the means of all pairs, ``[pairs]``, of the texts' means ``[B, 1, D]``."""
    mean = x.mean(dim=(0, 1)).cpu().numpy()
    return np.hypot(mean[:pairs], mean[pairs : 2 * pairs])


def _scatter(found: OffsetFeatures) -> Picture:
    moving = found.inv_freq > 0
    turns = found.inv_freq[moving] * found.context_length / TURN
    return Picture(
        "offset_features",
        radius_and_angle(turns, found.key_radius[moving], found.angle[moving], RADII),
        "Every rotary pair of every query head by its turns within C = "
        f"{found.context_length:,} tokens, slow pairs to the right: the radius of its mean key, "
        "and the angle from its mean query to its mean key (rad), larger and darker with the "
        "radius. Dashed: the upper bound; orange: the lower bound; dotted: the radii of the table. "
        "Large pairs should lie right of the one and above the other.",
        COLUMNS,
        list(zip(*(getattr(found, name).tolist() for name in COLUMNS), strict=True)),
    )


def _curves(found: OffsetFeatures, shown: list[Feature]) -> Picture:
    C = found.context_length
    distances = np.unique(np.geomspace(1, C + 1, DISTANCES).astype(int)) - 1
    panels, rows = {}, []
    for one in shown:
        at = one.points
        parts = contributions(found, at.layer, at.head, distances.tolist())
        total = parts.sum(axis=0)
        curves = {"all pairs": total, f"all but pair {at.pair}": total - parts[at.pair]}
        for pair in np.argsort(-np.abs(parts).max(axis=1))[:CURVES]:
            curves[f"pair {pair}"] = parts[pair]
        panels[one.name] = (distances, curves)
        rows += [
            (at.layer, at.head, name, int(distance), float(value))
            for name, values in curves.items()
            for distance, value in zip(distances, values, strict=True)
        ]
    return Picture(
        "offset_contributions",
        by_distance(panels, C),
        "What the means of rotary pairs add to the logit by distance, in the heads of these "
        "features: all pairs together, all but the feature, and the strongest pairs. What the "
        "first two lines differ by is what the feature does to far tokens.",
        ("layer", "head", "curve", "distance", "part_of_logit"),
        rows,
    )


def _table(found: OffsetFeatures) -> Grid:
    return Grid(
        f"Of {len(found.angle):,} pairs, {percent(found.share)} are under the upper bound (UB), "
        f"with a mean lower bound (LB) of {number(found.mean_lower_bound)} rad. Recall: the share "
        "of the pairs with so long a mean key that is under the one, and above the other, or the "
        "other less 0.1 rad.",
        ("min. radius", "pairs", "UB recall", "LB recall", "LB − 0.1 recall"),
        [
            (f"{one.radius:g}", one.positives, *map(percent, (one.upper, one.lower, one.relaxed)))
            for one in found.recall
        ],
    )


def _findings(found: OffsetFeatures, shown: list[Feature]) -> list[str]:
    C = found.context_length
    text = [
        f"{percent(found.share)} of {len(found.angle):,} pairs turn less than once in {C:,} "
        f"tokens; the mean of their lower bounds is {number(found.mean_lower_bound)} rad."
    ]
    for one in found.recall:
        if one.positives:
            text.append(
                f"Of the {one.positives:,} pairs of radius {one.radius:g} or more, "
                f"{percent(one.upper)} are under the upper bound, {percent(one.lower)} also above "
                f"the lower bound, {percent(one.relaxed)} above it less 0.1 rad."
            )
    if not found.recall[0].positives:
        text.append(
            f"No pair has a radius of {found.recall[0].radius:g}; the largest is "
            f"{found.key_radius.max():.2f}."
        )
    if shown:
        text.append(_strongest(found, shown[0]))
    return text


def _strongest(found: OffsetFeatures, one: Feature) -> str:
    at, C = one.points, found.context_length
    parts = contributions(found, at.layer, at.head, range(C + 1))[at.pair]
    (row,) = np.flatnonzero(
        (found.layer == at.layer) & (found.head == at.head) & (found.pair == at.pair)
    )
    angle, lower = found.angle[row], found.lower_bound[row]
    text = (
        f"The strongest pair under the upper bound is {one.name}: angle {angle:.2f} rad, lower "
        f"bound {lower:.2f}. Its part of the logit is {parts[0]:.1f} at distance 0 and "
    )
    if (parts[1:] >= parts[0]).any():
        return f"{text}not always below that up to {C:,} tokens: no offset feature."
    return (
        f"{text}below that up to {C:,} tokens: an offset feature, lowest ({parts.min():.1f}) at "
        f"{int(parts.argmin()):,}."
    )
