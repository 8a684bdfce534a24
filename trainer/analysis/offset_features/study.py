"""The sections on rotary offset features: of one model (Rotary Offset Features, Sec. 4, Table 2),
and of two models on one text, such as a model and its extension (App. C, Fig. 15 and 16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import Heads, capture
from trainer.analysis.offset_features.drawing import (
    Changes,
    OnePair,
    changes_by_pair,
    pairs_in_both,
)
from trainer.analysis.offset_features.figures import (
    AS_TRAINED,
    ExtendedBounds,
    Feature,
    channels,
    curves,
    feature_points,
    first_possible,
    number,
    percent,
    points_of_head,
    scatter,
    stability_findings,
    stable_angles,
)
from trainer.analysis.offset_features.heads import OffsetSinks, OffsetSteps
from trainer.analysis.offset_features.measure import (
    COLUMNS,
    RADII,
    TURN,
    AngleStability,
    OffsetFeatures,
    OffsetFeatureSearch,
    bounds,
    common_pairs,
    contributions,
    head_view,
    with_bounds_of,
)
from trainer.analysis.studies.section import Grid, Part, Picture, Section
from trainer.analysis.studies.study import Study, Target

SHOWN = 3
"""Number of features that pictures show if no heads are chosen."""


class OffsetFeaturesStudy(Study):
    """Radii and angles of every pair, their bounds, the bounds at a longer length, and sinks."""

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
        features = results[AS_TRAINED]
        stability, sinks = self._stability.result(), self._sinks.part(self.target)
        steps = self._steps.part(features, len(self.target.model.layout.layers))
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
                *_findings(features, self._features),
                *stability_findings(stability),
                *sinks.findings,
                *steps.findings,
                *self._extended.findings(results),
            ),
            (
                scatter(features),
                stable_angles(stability, len(self.target.model.layout.layers)),
                *self._of_heads(features),
                *sinks.pictures,
                *steps.pictures,
                self._extended.picture(features),
            ),
            (table(features), self._extended.grid(results), *sinks.grids, *steps.grids),
            {
                "context_length": features.context_length,
                "extended_length": self._extended.length,
                "methods": {
                    name: {
                        "share": one.share,
                        "mean_lower_bound": one.mean_lower_bound,
                        "recall": [asdict(recall) for recall in one.recall],
                    }
                    for name, one in results.items()
                },
                "features": {name: to_json(getattr(features, name)) for name in COLUMNS},
            }
            | sinks.numbers
            | steps.numbers,
        )

    def _of_heads(self, features: OffsetFeatures) -> list[Picture]:
        """Draw the strongest heads, or the chosen ones that rotate."""
        shown, C = self._features, self.target.training_length
        if not shown:
            return []
        whole = shown if self.target.chosen else shown[:1]
        return [
            channels(shown),
            feature_points(shown, C),
            *(points_of_head(one, C, self.target.pairs) for one in whole),
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
        f"Of {len(features.angle):,} pairs, {percent(features.share)} are under the upper bound "
        f"(UB), with a mean lower bound (LB) of {number(features.mean_lower_bound)} rad. Recall: "
        "the share of the pairs with so long a mean key that is under the one, and above the "
        "other, or the other less 0.1 rad.",
        ("min. radius", "pairs", "UB recall", "LB recall", "LB − 0.1 recall"),
        [
            (f"{one.radius:g}", one.positives, *map(percent, (one.upper, one.lower, one.relaxed)))
            for one in features.recall
        ],
    )


def _findings(features: OffsetFeatures, shown: Sequence[Feature]) -> list[str]:
    C = features.context_length
    text = [
        f"{percent(features.share)} of {len(features.angle):,} pairs turn less than once in {C:,} "
        f"tokens; the mean of their lower bounds is {number(features.mean_lower_bound)} rad."
    ]
    for one in features.recall:
        if one.positives:
            text.append(
                f"Of the {one.positives:,} pairs of radius {one.radius:g} or more, "
                f"{percent(one.upper)} are under the upper bound, {percent(one.lower)} also above "
                f"the lower bound, {percent(one.relaxed)} above it less 0.1 rad."
            )
    if not features.recall[0].positives:
        text.append(
            f"No pair has a radius of {features.recall[0].radius:g}; the largest is "
            f"{features.key_radius.max():.2f}."
        )
    if shown and shown[0].possible:
        text.append(_strongest(features, shown[0]))
    return text


def _strongest(features: OffsetFeatures, one: Feature) -> str:
    at, C = one.view, features.context_length
    parts = contributions(features, at.layer, at.head, range(C + 1))[one.pair]
    (row,) = np.flatnonzero(
        (features.layer == at.layer) & (features.head == at.head) & (features.pair == one.pair)
    )
    angle, lower = features.angle[row], features.lower_bound[row]
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


LONG = 0.9
"""Quantile of radii from which a pair is large if none reaches the table's smallest radius."""


class OffsetChanges:
    """Compare two models that read the same text, up to the shorter training length."""

    key: ClassVar[str] = "offset_changes"
    title: ClassVar[str] = "Rotary offset features of two models"

    def __init__(self, before: Target, after: Target) -> None:
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.length = min(before.length, before.training_length, after.training_length)

    def run(self) -> Section:
        """Read the text with both models and write the section."""
        before, after = self._features(self.before), self._features(self.after)
        part = self._heads(before, after)
        tables = {
            f"{name}, own bounds": of for name, of in zip(self.names, (before, after), strict=True)
        }
        if part.pictures:
            was, now = common_pairs(before, after)
            tables[f"{self.names[1]}, bounds of {self.names[0]}"] = with_bounds_of(now, by=was)
        return Section(
            self.key,
            self.title,
            f"Two models read the same {self.length:,} tokens: {self.names[0]}, with a context of "
            f"{before.context_length:,}, and {self.names[1]}, with {after.context_length:,}. A "
            "longer context moves the bounds: pairs that turned less than once may no longer, and "
            "of the others the least angle grows. If training follows the bounds, keys of the "
            "former become shorter and angles of the latter larger.",
            ("change of the radius = |k̄| after − |k̄| before",),
            "Rotary Offset Features in Large Language Models, App. C, Fig. 15 and 16, Table 2.",
            part.findings,
            part.pictures,
            (_table(tables),),
            {
                "names": list(self.names),
                "tokens": self.length,
                "models": {
                    name: {
                        "context_length": of.context_length,
                        "share": of.share,
                        "mean_lower_bound": of.mean_lower_bound,
                        "recall": [asdict(recall) for recall in of.recall],
                    }
                    for name, of in tables.items()
                },
            }
            | part.numbers,
        )

    def _features(self, target: Target) -> OffsetFeatures:
        search = OffsetFeatureSearch()
        capture(target.model, target.ids[:, : self.length], search.update)
        return search.result()

    def _heads(self, before: OffsetFeatures, after: OffsetFeatures) -> Part:
        shapes = [
            f"{len(t.model.layout.layers)} x {t.model.config.num_attention_heads}"
            for t in (self.before, self.after)
        ]
        if shapes[0] != shapes[1]:
            refusal = (
                f"Heads were not compared: the models have {' and '.join(shapes)} layers and heads."
            )
            return Part((refusal,))
        was, now = common_pairs(before, after)
        if not len(was.pair):
            return Part(("Heads were not compared: no layer rotates in both models.",))
        both = np.maximum(was.key_radius, now.key_radius)
        large = both >= min(RADII[0], float(np.quantile(both, LONG)))
        change = now.key_radius - was.key_radius
        turned = np.mod(now.angle - was.angle + TURN / 2, TURN) - TURN / 2
        shown = self._shown(was, change)
        return Part(
            tuple(self._findings(was, now, change, large)),
            (
                self._by_pair(was, now, change, np.where(large, turned, np.nan)),
                self._of_pairs(was, now, shown),
            ),
            numbers={
                name: to_json(values)
                for name, values in {
                    **{name: getattr(was, name) for name in ("layer", "head", "pair")},
                    "radius_before": was.key_radius,
                    "radius_after": now.key_radius,
                    "angle_before": was.angle,
                    "angle_after": now.angle,
                }.items()
            },
        )

    def _shown(self, was: OffsetFeatures, change: Array) -> list[int]:
        """Return the chosen pairs, or the two whose mean radius shrank and grew most.

        Without chosen pairs, only pairs that were under the upper bound are considered, if rotating
        are any.
        """
        rotating = np.unique(was.pair)
        if asked := [pair for pair in self.after.pairs if pair in rotating]:
            return asked
        index = np.unique(was.pair[was.possible]) if was.possible.any() else rotating
        means = [change[was.pair == pair].mean() for pair in index]
        return sorted({int(index[np.argmin(means)]), int(index[np.argmax(means)])})

    def _findings(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, large: Array
    ) -> list[str]:
        first, second = self.names
        counts = [int((of.key_radius >= RADII[0]).sum()) for of in (was, now)]
        text = [
            f"Pairs of radius {RADII[0]:g} or more: {counts[0]:,} in {first}, {counts[1]:,} in "
            f"{second}; the mean radius of all goes from {was.key_radius.mean():.2f} to "
            f"{now.key_radius.mean():.2f}."
        ]
        for now_possible, what in ((False, "no longer are"), (True, "still are")):
            among = was.possible & (now.possible == now_possible) & large
            if among.any():
                text.append(
                    f"Keys of the {among.sum():,} long pairs that are under the upper bound in "
                    f"{first} and {what} in {second} change their radius by "
                    f"{change[among].mean():+.2f} on average; "
                    f"{(change[among] < 0).mean():.0%} of them shrink."
                )
        if counts[1]:
            own, others = (of.recall[0].lower for of in (now, with_bounds_of(now, by=was)))
            text.append(
                f"Of the pairs of {second} with radius {RADII[0]:g} or more, {percent(own)} are "
                f"within its own bounds and {percent(others)} within those of {first}."
            )
        return text

    def _by_pair(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, turned: Array
    ) -> Picture:
        first = dict(zip(self.names, map(first_possible, (was, now)), strict=True))
        return Picture(
            "offset_changes_by_pair",
            changes_by_pair(Changes(was.layer, was.pair, change, turned), first),
            f"From {self.names[0]} to {self.names[1]}, every head by its pair and, in colour and "
            "within the width of a pair, by its layer. Above: how much longer its mean key became. "
            "Below: how far the angle from mean query to mean key turned, of the long pairs alone. "
            "Right of the dashed and dotted lines pairs turn less than once in the context. Where "
            "training follows the bounds radii shrink between the two lines.",
            *_rows(was, now),
        )

    def _of_pairs(self, was: OffsetFeatures, now: OffsetFeatures, shown: list[int]) -> Picture:
        panels = []
        for pair in shown:
            at = was.pair == pair
            lower = tuple(
                float(of.lower_bound[at & of.possible].mean()) if of.possible[at].any() else None
                for of in (was, now)
            )
            radii, angles = (
                np.stack([getattr(of, name)[at] for of in (was, now)])
                for name in ("key_radius", "angle")
            )
            panels.append(OnePair(pair, radii, angles, (lower[0], lower[1])))
        return Picture(
            "offset_changes_of_pairs",
            pairs_in_both(panels, self.names),
            "Radius of the mean key and angle from the mean query to it in every head, in both "
            "models, with a line between the two; dashed and dotted: the lower bounds of the one "
            "and of the other, where the pair is under its upper bound.",
            *_rows(was, now, shown),
        )


HEADER = ("layer", "head", "pair", "radius_before", "radius_after", "angle_before", "angle_after")


def _rows(
    was: OffsetFeatures, now: OffsetFeatures, pairs: list[int] | None = None
) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """Return header and rows of a CSV file about these pairs, or about all."""
    at = np.isin(was.pair, pairs) if pairs is not None else slice(None)
    columns = (was.layer, was.head, was.pair, was.key_radius, now.key_radius, was.angle, now.angle)
    return HEADER, list(zip(*(column[at].tolist() for column in columns), strict=True))


def _table(models: dict[str, OffsetFeatures]) -> Grid:
    return Grid(
        "Share of pairs under the upper bound (UB) and their mean lower bound (LB); of the pairs "
        "with so long a mean key, the shares that are under the one, and above the other, or the "
        "other less 0.1 rad.",
        (
            *("model", "pairs", "under UB", "mean LB (rad)", "min. radius", "positives"),
            *("UB recall", "LB recall", "LB − 0.1 recall"),
        ),
        [
            (
                *(name, len(of.pair), percent(of.share), number(of.mean_lower_bound)),
                *(f"{one.radius:g}", one.positives),
                *map(percent, (one.upper, one.lower, one.relaxed)),
            )
            for name, of in models.items()
            for one in of.recall
        ],
    )
