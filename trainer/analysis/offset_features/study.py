"""The section on rotary offset features of one model (Rotary Offset Features, Sec. 4, Table 2), and
on the bounds after a context extension (App. C, Fig. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features.figures import (
    PAIR_INDEX,
    Feature,
    angle_axis,
    channels,
    curves,
    feature_points,
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
    contributions,
    head_view,
)
from trainer.analysis.studies.section import Grid, Part, Picture, Rows, Section, joined, wide_rows
from trainer.analysis.studies.study import Study, Target
from trainer.plotting.lines import COLOURS, Frame, Panel, Series, side_by_side
from trainer.positional.rescaling import RESCALINGS, rescaled
from trainer.positional.spectrum import Spectrum

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
            best for head in range(heads.q.shape[1]) if (best := self._strongest(means, head))
        ]
        for possible, _, head, pair, fast in strongest:
            if possible:
                self._sinks.update(heads, head, pair, fast)
        if self.target.chosen:
            chosen = {head for layer, head in self.target.chosen if layer == heads.layer}
            strongest = [pair for pair in strongest if pair[2] in chosen]
        else:
            strongest = sorted(strongest, reverse=True)[:1]
        for possible, strength, head, pair, _ in strongest:
            turns = self._spectrum(means, head)
            view = head_view(heads, head)
            self._features.append(Feature(possible, strength, pair, turns, view))
        self._features.sort(key=lambda feature: (not feature.possible, -feature.strength))
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
        stability, layers = self._stability.result(), len(self.target.model.layout.layers)
        first = Part(
            (*_findings(features, self._features), *stability_findings(stability)),
            (scatter(features), stable_angles(stability, layers), *self._heads(features)),
            (table(features), self._extended.grid(results)),
            {
                "context_length": features.context_length,
                "extended_length": self._extended.length,
                "methods": {name: bounded.summary() for name, bounded in results.items()},
                "features": {name: to_json(getattr(features, name)) for name in COLUMNS},
            },
        )
        last = Part(self._extended.findings(results), (self._extended.picture(features),))
        effects = (self._sinks.part(layers), self._steps.part(features, layers))
        return Section(
            self.key,
            self.title,
            "A pair whose queries and keys have long means adds a part to the logit that depends "
            "on the distance alone. It is an offset feature when that part stays below its value "
            "at distance 0 up to the context length C: then it turns less than once in C (the "
            "upper bound on its frequency), and the angle from query to key is large enough (the "
            "lower bound). The radius is the length of the mean key; means are over all positions, "
            "before the rotation. Keys of attention sinks leave the mean: they lie near the origin "
            "or towards the queries, and the effect on attention is measured by taking the "
            "pair's part out of all scores. The fastest pair is no such feature: where its angle "
            "is the angle that it turns in one token, it selects the token before.",
            (
                "part(δ) = |q̄| |k̄| cos(φ − θ δ) / √D",
                "upper bound: θ < 2π / C",
                "lower bound: φ ≥ π + θ C / 2",
            ),
            "Rotary Offset Features in Large Language Models, Eq. 13–16, Sec. 4.2 and 4.3.1, "
            "Table 2, Fig. 1, 2, 4, 6–8 and 11–14, App. C.",
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
        f"Of {len(features.angle):,} pairs, {percent(features.share)} are under the upper bound "
        f"(UB), with a mean lower bound (LB) of {number(features.mean_lower_bound)} rad. Recall: "
        "the share of the pairs with a mean key of the minimal radius or longer that is under the "
        "upper bound, also above the lower bound, and also above the lower bound less 0.1 rad.",
        ("min. radius", "pairs", "UB recall", "LB recall", "LB − 0.1 recall"),
        [
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


AS_TRAINED, UNSCALED = "as trained", "not rescaled"
METHODS = {"PI": "pi", "NTK": "ntk", "YaRN": "yarn"}
NAMES = (AS_TRAINED, UNSCALED, *METHODS)
FACTOR = 4
"""Factor of the extension if the text is not longer than the training length."""


class ExtendedBounds:
    """Collect features under context extensions: the model's means, judged by the bounds of
    rescaled frequencies (App. C).

    Bounds are for the training length C as trained, and for the text's length, or 4 C if the text
    is not longer than C, without rescaling and by each of :data:`METHODS`.
    """

    def __init__(self, target: Target) -> None:
        self.C = target.training_length
        self.length = target.length if target.length > self.C else FACTOR * self.C
        self.spectrum = next((s for s in target.model.layout.spectra if s.rotates), None)
        self._search = OffsetFeatureSearch()

    def _change(self, name: str, spectrum: Spectrum) -> Spectrum:
        if name not in METHODS:
            return spectrum
        return rescaled(spectrum, RESCALINGS[METHODS[name]], self.C, self.length / self.C)

    def _at(self, name: str) -> int:
        return self.C if name == AS_TRAINED else self.length

    def update(self, heads: Heads) -> None:
        """Add one layer."""
        self._search.update(heads)

    def results(self) -> dict[str, OffsetFeatures]:
        """Return features by method, the model as trained first."""
        return {
            name: self._search.result(self._at(name), partial(self._change, name)) for name in NAMES
        }

    def findings(self, results: dict[str, OffsetFeatures]) -> tuple[str, ...]:
        """Report how many large features are still within both bounds."""
        before = results[AS_TRAINED].recall[0]
        if not before.positives:
            return ()
        within = ", ".join(
            f"{name} {percent(features.recall[0].lower)}"
            for name, features in results.items()
            if name != AS_TRAINED
        )
        return (
            f"At {self.length:,} tokens both bounds hold for these shares of the pairs of radius "
            f"{RADII[0]:g} or more: {within}; as trained, at {self.C:,}, {percent(before.lower)}.",
        )

    def grid(self, results: dict[str, OffsetFeatures]) -> Grid:
        """Make a table of both bounds and their recall by method."""
        return Grid(
            f"The bounds at {self.C:,} tokens as trained, and at {self.length:,} tokens by "
            "rescaling, for the means of the model as it is: pairs under the upper bound, their "
            f"mean lower bound, and the shares of the pairs of radius {RADII[0]:g} or more under "
            "the upper and above the lower bound.",
            ("method", "length", "under UB", "mean LB (rad)", "UB recall", "LB recall"),
            [
                (
                    name,
                    self._at(name),
                    *(percent(features.share), number(features.mean_lower_bound)),
                    *map(percent, (features.recall[0].upper, features.recall[0].lower)),
                )
                for name, features in results.items()
            ],
        )

    def picture(self, features: OffsetFeatures) -> Picture:
        """Draw the first spectrum that rotates with lower bounds, and the large features as
        trained."""
        assert self.spectrum is not None
        large, pairs = features.key_radius >= RADII[0], len(self.spectrum.inv_freq)
        turns: list[Series] = []
        lower: list[Series] = []
        rows: Rows = []
        for index, name in enumerate(NAMES):
            length = self._at(name)
            limits = bounds(self._change(name, self.spectrum).at(length, self.C), length)
            turned = limits.inv_freq * length / TURN
            # Lines of some methods coincide: let neighbours differ in their dashes too.
            style = index + len(COLOURS) * (index % 3)
            for lines, y, shown in (
                (turns, turned, turned > 0),
                (lower, limits.angle, limits.possible),
            ):
                drawn = np.flatnonzero(shown)
                lines.append(Series(name, style, drawn.tolist(), y[drawn].tolist(), marked=False))
            rows += [(name, *row) for row in wide_rows([turned, limits.angle])]

        def prepare_turns(axes: Axes) -> None:
            axes.set_yscale("log")
            axes.set_xlim(-0.5, pairs - 0.5)

        def prepare_angles(axes: Axes) -> None:
            place = features.pair[large], features.angle[large]
            axes.scatter(*place, s=8, color="#b0b0b0", linewidths=0, rasterized=True)
            angle_axis(axes)
            axes.set_xlim(-0.5, pairs - 0.5)

        panels = [
            Panel(
                *("upper bound", turns),
                Frame("", "turns within the length", prepare_turns, horizontal=((1, "one turn"),)),
            ),
            Panel("lower bounds", lower, Frame("", "angle φ (rad)", prepare_angles)),
        ]
        return Picture(
            "extended_bounds",
            side_by_side(panels, x_label=PAIR_INDEX, height=2.6, balanced=True),
            f"The bounds at {self.C:,} tokens as trained and at {self.length:,} tokens by "
            "rescaling. Left: turns of every pair within the length (logarithmic); below the "
            "dotted line it can be an offset feature. Right: the lower bounds of these pairs, and "
            f"in grey the angles of the pairs of radius {RADII[0]:g} or more.",
            ("method", "pair", "turns", "lower_bound"),
            rows,
        )
