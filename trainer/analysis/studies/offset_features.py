"""Rotary offset features of a model: where its mean queries and keys are large, whether the bounds
predict it, and what they do for attention sinks (Rotary Offset Features, Sec. 4, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.angle_stability import AngleStability
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.head_view import head_view
from trainer.analysis.offset_features import COLUMNS, OffsetFeatures, bounds, contributions
from trainer.analysis.studies.angle_pictures import stable_angles, steadier
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.extended_bounds import AS_TRAINED, ExtendedBounds, number, percent
from trainer.analysis.studies.offset_pictures import (
    Feature,
    channels,
    curves,
    feature_points,
    head_points,
    scatter,
)
from trainer.analysis.studies.offset_sinks import OffsetSinks
from trainer.analysis.studies.offset_steps import OffsetSteps
from trainer.analysis.studies.section import Grid, Picture, Section
from trainer.analysis.studies.study import Study, Target

SHOWN = 3
"""Features that pictures show where no heads are chosen."""


class OffsetFeaturesStudy(Study):
    """Radii and angles of every pair, their bounds, these bounds at a longer length, and sinks."""

    key: ClassVar[str] = "offset_features"
    title: ClassVar[str] = "Rotary offset features"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._extended = ExtendedBounds(target)
        self._features: list[Feature] = []
        self._stability = AngleStability()
        self._sinks = OffsetSinks()
        self._steps = OffsetSteps()

    @classmethod
    def problems(cls, target: Target) -> list[str]:
        """Without a rotation there are no pairs."""
        if target.rotates:
            return []
        return ["expected a model with a rotary encoding, got one without rotation in any head."]

    def on_layer(self, heads: Heads) -> None:
        """Means of all pairs; the strongest one of every head, and of some heads its points."""
        # Once for all: the temporary float64 copies of a layer leave holes in memory.
        means = replace(
            heads,
            q=heads.q.mean(dim=2, keepdim=True, dtype=torch.float64),
            k=heads.k.mean(dim=2, keepdim=True, dtype=torch.float64),
        )
        self._extended.update(means)
        self._stability.update(heads)
        self._steps.update(heads)
        strongest = [
            one for head in range(heads.q.shape[1]) if (one := self._strongest(means, head))
        ]
        for possible, _, head, pair, fast in strongest:
            if possible:
                self._sinks.update(heads, head, pair, fast)
        if self.target.chosen:
            chosen = {head for layer, head in self.target.chosen if layer == heads.layer}
            strongest = [one for one in strongest if one[2] in chosen]
        else:
            strongest = sorted(strongest, reverse=True)[:1]
        for possible, strength, head, pair, _ in strongest:
            turns = self._spectrum(means, head)
            view = head_view(heads, head)
            self._features.append(Feature(possible, strength, pair, turns, view))
        self._features.sort(key=lambda one: (not one.possible, -one.strength))
        if not self.target.chosen:
            del self._features[SHOWN:]

    def _spectrum(self, means: Heads, head: int) -> Array:
        C, spectra = self.target.training_length, means.encoding.spectra
        return np.array(spectra[head // means.queries_per_key].at(C, C).inv_freq)

    def _strongest(
        self, means: Heads, head: int
    ) -> tuple[bool, float, int, int, int | None] | None:
        """The pair of longest means, of those under the upper bound where there are any: whether
        it is, the product of the lengths, head and index; and the strongest of the faster pairs.
        None where nothing rotates."""
        C, kv = self.target.training_length, head // means.queries_per_key
        known = bounds(means.encoding.spectra[kv].at(C, C), C)
        moving = known.inv_freq > 0
        if not moving.any():
            return None
        among = known.possible if known.possible.any() else moving
        pairs = len(among)
        size = _radii(means.q[:, head], pairs) * _radii(means.k[:, kv], pairs)
        pair = int(np.where(among, size, -1).argmax())
        faster = moving & ~known.possible
        fast = int(np.where(faster, size, -1).argmax()) if faster.any() else None
        return bool(known.possible[pair]), float(size[pair]), head, pair, fast

    def section(self) -> Section:
        """Scatter plots, heads with their pairs, curves by distance, sinks, and the tables."""
        results = self._extended.results()
        found = results[AS_TRAINED]
        stability, sinks = self._stability.result(), self._sinks.part(self.target)
        steps = self._steps.part(found, len(self.target.model.layout.layers))
        return Section(
            self.key,
            self.title,
            "A pair whose queries and keys have long means adds a part to the logit that depends "
            "on the distance alone. It is an offset feature when that part stays below its value "
            "at distance 0 up to the context length C: then it turns less than once in C (the "
            "upper bound on its frequency), and the angle from query to key is large enough (the "
            "lower bound). The radius is the length of the mean key; means are over all positions, "
            "before the rotation. Keys of attention sinks leave the mean: they lie near the origin "
            "or towards the queries, and what that does to attention is measured by taking the "
            "pair's part out of all scores. The fastest pair is no such feature: where its angle "
            "is what it turns in one token, it selects the token before.",
            (
                "part(δ) = |q̄| |k̄| cos(φ − θ δ) / √D",
                "upper bound: θ < 2π / C",
                "lower bound: φ ≥ π + θ C / 2",
            ),
            "Rotary Offset Features in Large Language Models, Eq. 13–16, Sec. 4.2 and 4.3.1, "
            "Table 2, Fig. 1, 2, 4, 6–8 and 11–14, App. C.",
            (
                *_findings(found, self._features),
                *steadier(stability),
                *sinks.findings,
                *steps.findings,
                *self._extended.findings(results),
            ),
            (
                scatter(found),
                stable_angles(stability),
                *self._of_heads(found),
                *sinks.pictures,
                *steps.pictures,
                self._extended.picture(found),
            ),
            (table(found), self._extended.grid(results), *sinks.grids, *steps.grids),
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
            }
            | sinks.numbers
            | steps.numbers,
        )

    def _of_heads(self, found: OffsetFeatures) -> list[Picture]:
        """Pictures of the strongest heads, or of the chosen ones that rotate."""
        shown, C = self._features, self.target.training_length
        if not shown:
            return []
        whole = shown if self.target.chosen else shown[:1]
        return [
            channels(shown),
            feature_points(shown, C),
            *(head_points(one, C, self.target.pairs) for one in whole),
            curves(found, shown),
        ]


def _radii(x: Tensor, pairs: int) -> Array:
    """Lengths of the means of all pairs, ``[pairs]``, of the texts' means ``[B, 1, D]``."""
    mean = x.mean(dim=(0, 1)).cpu().numpy()
    return np.hypot(mean[:pairs], mean[pairs : 2 * pairs])


def table(found: OffsetFeatures) -> Grid:
    """How many large pairs the bounds predict (Table 2)."""
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


def _findings(found: OffsetFeatures, shown: Sequence[Feature]) -> list[str]:
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
    if shown and shown[0].possible:
        text.append(_strongest(found, shown[0]))
    return text


def _strongest(found: OffsetFeatures, one: Feature) -> str:
    at, C = one.view, found.context_length
    parts = contributions(found, at.layer, at.head, range(C + 1))[one.pair]
    (row,) = np.flatnonzero(
        (found.layer == at.layer) & (found.head == at.head) & (found.pair == one.pair)
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
