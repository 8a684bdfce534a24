"""The section on rotary offset features of one model (Rotary Offset Features, Sec. 4, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features.extended_bounds import TITLES, ExtendedBounds
from trainer.analysis.offset_features.figures import (
    Feature,
    channels,
    curves,
    feature_points,
    number,
    percent,
    points_of_head,
    scatter,
    stability_part,
)
from trainer.analysis.offset_features.heads import (
    FastestPairs,
    Row,
    fastest_pairs,
    sink_row,
    sinks_part,
    steps_part,
)
from trainer.analysis.offset_features.measure import (
    AngleStability,
    OffsetFeatures,
    bounds,
    contributions,
    head_view,
)
from trainer.analysis.studies.section import Grid, Part, Picture, Section, joined
from trainer.analysis.studies.study import Study, Target

SHOWN = 3
"""Number of features that pictures show if no heads are chosen."""


StrongPair = tuple[bool, float, int, int, int | None]


class OffsetFeaturesStudy(Study):
    """Radii and angles of every pair, their bounds, the bounds at a longer length, and sinks."""

    key: ClassVar[str] = "offset_features"
    title: ClassVar[str] = "Rotary offset features"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._extended = ExtendedBounds(target)
        self._features: list[Feature] = []
        self._stability = AngleStability()
        self._strong_pairs: dict[int, list[StrongPair]] = {}  # of every layer
        self._sinks: list[Row] = []
        self._fastest: FastestPairs = {}

    @classmethod
    def problems(cls, target: Target) -> list[str]:
        """Also refuse models without rotation, which have no pairs."""
        if target.rotates:
            return []
        return ["expected a model with a rotary encoding, got one without rotation in any head."]

    def on_layer(self, heads: Heads) -> None:
        """Add the means of all pairs, the strongest pair of every head, and the points of some
        heads."""
        # Convert once for all: temporary float64 copies of a layer fragment memory.
        means = replace(
            heads,
            q=heads.q.mean(dim=2, keepdim=True, dtype=torch.float64),
            k=heads.k.mean(dim=2, keepdim=True, dtype=torch.float64),
        )
        self._extended.search.update(means)
        self._stability.update(heads)
        strongest = [
            best for head in range(heads.q.shape[1]) if (best := self._strongest(means, head))
        ]
        self._strong_pairs[heads.layer] = strongest
        if self.target.prefix is None:
            self._measure_effects(heads)
        if self.target.chosen:
            chosen = {head for layer, head in self.target.chosen if layer == heads.layer}
            strongest = [pair for pair in strongest if pair[2] in chosen]
        else:
            strongest = sorted(strongest, reverse=True)[:1]
        self._features += [
            Feature(possible, strength, pair, head_view(heads, head))
            for possible, strength, head, pair, _ in strongest
        ]
        self._features.sort(key=lambda feature: (not feature.possible, -feature.strength))
        if not self.target.chosen:
            del self._features[SHOWN:]

    def on_prefix(self, heads: Heads) -> None:
        """Measure the effects of pairs on attention, whose queries lie within C."""
        self._measure_effects(heads)

    def _measure_effects(self, heads: Heads) -> None:
        self._fastest |= fastest_pairs(heads)
        for possible, _, head, pair, fast in self._strong_pairs[heads.layer]:
            if possible and (row := sink_row(heads, head, pair, fast)) is not None:
                self._sinks.append(row)

    def _strongest(self, means: Heads, head: int) -> StrongPair | None:
        """Find the pair of a head with the longest means, under the upper bound if any pair is.

        Returns:
            whether the pair is under the upper bound, the product of the lengths, the head, the
                pair, and the strongest of the faster pairs if there are any. None if the head does
                not rotate.
        """
        C, kv = self.target.training_length, head // means.queries_per_key
        limits = bounds(means.encoding.spectra[kv].at(C, C), C)
        moving = limits.inv_freq > 0
        if not moving.any():
            return None
        among = limits.possible if limits.possible.any() else moving
        pairs = len(among)
        size = _radii(means.q[:, head], pairs) * _radii(means.k[:, kv], pairs)
        pair = int(np.where(among, size, -1).argmax())
        faster = moving & ~limits.possible
        fast = int(np.where(faster, size, -1).argmax()) if faster.any() else None
        return bool(limits.possible[pair]), float(size[pair]), head, pair, fast

    def section(self) -> Section:
        """Write the section: scatter plots, heads with their pairs, curves by distance, sinks,
        tables."""
        results = self._extended.results()
        features = results["trained"]
        layers = len(self.target.model.layout.layers)
        stability = stability_part(self._stability.result(), layers)
        first = Part(
            findings=(*_findings(features, self._features), *stability.findings),
            pictures=(scatter(features), *stability.pictures, *self._heads(features)),
            grids=(table(features), self._extended.grid(results)),
            numbers={
                "context_length": features.context_length,
                "extended_length": self._extended.length,
                "methods": {TITLES[case]: bounded.summary() for case, bounded in results.items()},
                "features": {name: to_json(column) for name, column in features.columns.items()},
            },
        )
        last = Part(self._extended.findings(results), (self._extended.picture(features),))
        effects = (
            sinks_part(self._sinks, layers),
            steps_part(self._fastest, features, layers),
        )
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "A pair whose queries and keys have long means adds a part to the logit that "
                "depends on the distance alone. It is an offset feature when that part stays below "
                "its value at distance 0 up to the context length C: then it turns less than once "
                "in C (the upper bound on its frequency), and the angle from query to key is large "
                "enough (the lower bound). The radius is the length of the mean key; means are "
                "over all positions, before the rotation. Keys of attention sinks leave the mean: "
                "they lie near the origin or towards the queries, and the effect on attention is "
                "measured by taking the pair's part out of all scores. The fastest pair is no such "
                "feature: where its angle is the angle that it turns in one token, it selects the "
                "token before."
            ),
            formula=(
                "part(δ) = |q̄| |k̄| cos(φ − θ δ) / √D",
                "upper bound: θ < 2π / C",
                "lower bound: φ ≥ π + θ C / 2",
            ),
            source=(
                "Rotary Offset Features in Large Language Models, Eq. 13–16, Sec. 4.2 and 4.3.1, "
                "Table 2, Fig. 1, 2, 4, 6–8 and 11–14, App. C."
            ),
            **vars(joined([first, *effects, last])),
        )

    def _heads(self, features: OffsetFeatures) -> list[Picture]:
        """Draw the strongest heads, or the chosen ones that rotate."""
        shown, C = self._features, self.target.training_length
        if not shown:
            return []
        whole = shown if self.target.chosen else shown[:1]
        return [
            channels(shown),
            feature_points(shown, C),
            *(points_of_head(feature, C, self.target.pairs) for feature in whole),
            curves(features, shown),
        ]


def _radii(x: Tensor, pairs: int) -> Array:
    """Return the lengths of the means of all pairs, ``[pairs]``, from the texts' means ``[B, 1,
    D]``."""
    mean = x.mean(dim=(0, 1)).cpu().numpy()
    return np.hypot(mean[:pairs], mean[pairs : 2 * pairs])


def table(features: OffsetFeatures) -> Grid:
    """Make a table of how many large pairs the bounds predict (Table 2)."""
    return Grid(
        caption=(
            f"Of {len(features.angle):,} pairs, {percent(features.share)} are under the upper "
            f"bound (UB), with a mean lower bound (LB) of {number(features.mean_lower_bound)} rad. "
            "Recall: the share of the pairs with a mean key of the minimal radius or longer that "
            "is under the upper bound, also above the lower bound, and also above the lower bound "
            "less 0.1 rad."
        ),
        header=("min. radius", "pairs", "UB recall", "LB recall", "LB − 0.1 recall"),
        rows=[
            (
                *(f"{recall.radius:g}", recall.positives),
                *map(percent, (recall.upper, recall.lower, recall.relaxed)),
            )
            for recall in features.recall
        ],
    )


def _findings(features: OffsetFeatures, shown: Sequence[Feature]) -> list[str]:
    C = features.context_length
    text = [
        f"{percent(features.share)} of {len(features.angle):,} pairs turn less than once in {C:,} "
        f"tokens; the mean of their lower bounds is {number(features.mean_lower_bound)} rad."
    ]
    for recall in features.recall:
        if recall.positives:
            text.append(
                f"Of the {recall.positives:,} pairs of radius {recall.radius:g} or more, "
                f"{percent(recall.upper)} are under the upper bound, {percent(recall.lower)} also "
                f"above the lower bound, {percent(recall.relaxed)} above it less 0.1 rad."
            )
    if not features.recall[0].positives:
        text.append(
            f"No pair has a radius of {features.recall[0].radius:g}; the largest is "
            f"{features.key_radius.max():.2f}."
        )
    if shown and shown[0].possible:
        text.append(_strongest(features, shown[0]))
    return text


def _strongest(features: OffsetFeatures, feature: Feature) -> str:
    layer, head, C = feature.view.layer, feature.view.head, features.context_length
    parts = contributions(features, layer, head, range(C + 1))[feature.pair]
    (row,) = np.flatnonzero(
        (features.layer == layer) & (features.head == head) & (features.pair == feature.pair)
    )
    angle, lower = features.angle[row], features.lower_bound[row]
    text = (
        f"The strongest pair under the upper bound is {feature.name}: angle {angle:.2f} rad, lower "
        f"bound {lower:.2f}. Its part of the logit is {parts[0]:.1f} at distance 0 and "
    )
    if (parts[1:] >= parts[0]).any():
        return f"{text}not always below that up to {C:,} tokens: no offset feature."
    return (
        f"{text}below that up to {C:,} tokens: an offset feature, lowest ({parts.min():.1f}) at "
        f"{int(parts.argmin()):,}."
    )
