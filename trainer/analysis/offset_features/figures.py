"""Pictures of rotary offset features.

They show all pairs, the strongest heads, how stable angles are, and the bounds after a context
extension (Rotary Offset Features, Fig. 1, 2, 4, 6 to 8, 11 to 14 and App. C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from trainer.analysis.arrays import Array
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features.drawing import (
    PAIR_INDEX,
    Contributions,
    PairCloud,
    Radii,
    angle_axis,
    by_distance,
    clouds,
    radius_and_angle,
)
from trainer.analysis.offset_features.measure import (
    COLUMNS,
    RADII,
    STABILITY_COLUMNS,
    TURN,
    HeadView,
    OffsetFeatures,
    OffsetFeatureSearch,
    Stability,
    bounds,
    contributions,
)
from trainer.analysis.studies.section import Grid, Picture
from trainer.analysis.studies.study import Target
from trainer.plotting.lines import COLOURS, Frame, Panel, Series, side_by_side
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.points import HeadCloud, head_points
from trainer.positional.rescaling import RESCALINGS, rescaled
from trainer.positional.spectrum import Spectrum

DISTANCES = 400
COLUMNS_OF_MAPS = 3
LOUDEST = 0.999
"""Quantile of absolute activations that has the strongest colour."""


@dataclass(frozen=True)
class Feature:
    """The pair of a head with the longest means, among pairs under the upper bound if there are any
    (``possible``).

    ``strength``: product of the lengths of both means. ``turns``: radians a token of all pairs of
    the head.
    """

    possible: bool
    strength: float
    pair: int
    turns: Array
    view: HeadView

    @property
    def head(self) -> str:
        """Name of the head."""
        return f"L{self.view.layer}H{self.view.head}"

    @property
    def name(self) -> str:
        """Name of the head and the pair."""
        return f"{self.head}, pair {self.pair}"


def first_possible(features: OffsetFeatures) -> list[int]:
    """Return the first pair under the upper bound of every spectrum that has one."""
    firsts: dict[tuple[int, int], int] = {}
    at = zip(features.layer[features.possible], features.head[features.possible], strict=True)
    for key, pair in zip(at, features.pair[features.possible].tolist(), strict=True):
        firsts[key] = min(pair, firsts.get(key, pair))
    return sorted(set(firsts.values()))


def scatter(features: OffsetFeatures) -> Picture:
    """Draw radius and angle of every pair with the bounds (Fig. 8)."""
    moving = features.inv_freq > 0
    turns = features.inv_freq * features.context_length / TURN
    bounds = np.column_stack([features.pair, features.lower_bound])[features.possible]
    of_pairs = (features.pair, turns, features.key_radius, features.angle)
    lower = np.unique(bounds, axis=0).reshape(-1, 2).T
    return Picture(
        "offset_features",
        radius_and_angle(
            Radii(*(values[moving] for values in of_pairs)),
            RADII,
            first_possible(features),
            (lower[0], lower[1]),
        ),
        "Every rotary pair of every query head, on the left by its index, on the right by its "
        f"turns within C = {features.context_length:,} tokens, slow pairs to the right: the radius "
        "of its mean key, and the angle from its mean query to its mean key (rad), larger and "
        "darker with the radius. Dashed: the upper bound; orange: the lower bound; dotted: the "
        "radii of the table. Large pairs should lie right of the one and above the other.",
        COLUMNS,
        list(zip(*(getattr(features, name).tolist() for name in COLUMNS), strict=True)),
    )


def channels(shown: Sequence[Feature]) -> Picture:
    """Draw queries and keys of the heads along the text, every channel (Fig. 1)."""
    columns = min(COLUMNS_OF_MAPS, len(shown))
    maps = {
        f"{one.head}, {name}": getattr(one.view, of)
        for start in range(0, len(shown), columns)
        for name, of in (("queries", "query_map"), ("keys", "key_map"))
        for one in shown[start : start + columns]
    }
    size = float(np.quantile(np.abs(np.concatenate([m.ravel() for m in maps.values()])), LOUDEST))
    view = shown[0].view
    return Picture(
        "offset_channels",
        heat_maps(
            maps,
            Scale("activation", -size, size, signed=True),
            x="token",
            y="channel",
            columns=columns,
            cell=(view.cell, 1),
        ),
        "Queries and keys before the rotation, every channel along the first text"
        + (f", means over {view.cell} tokens" if view.cell > 1 else "")
        + f". Of {2 * view.pairs} channels that rotate, m and m + {view.pairs} are pair m: an "
        "offset feature is two bands of one colour that far apart. Single tokens that break a "
        "band of the keys are attention sinks.",
        ("layer", "head", "of", "channel", "from_token", "activation"),
        [
            (one.view.layer, one.view.head, name, channel, cell * one.view.cell, float(value))
            for one in shown
            for name, values in (("query", one.view.query_map), ("key", one.view.key_map))
            for (channel, cell), value in np.ndenumerate(values)
        ],
    )


def feature_points(shown: Sequence[Feature], trained: int) -> Picture:
    """Draw the points of the features (Fig. 7)."""
    panels = [_cloud(one, one.pair, trained, one.name) for one in shown]
    kind = "under the upper bound" if shown[0].possible else "of these heads"
    return Picture(
        "offset_feature_points",
        clouds(panels),
        f"Queries and keys of the strongest pairs {kind}, before the rotation, a "
        f"{_each(shown[0].view.step)}; arrows: the mean query and key, green: how far the query "
        "turns within the training length. A key far from the others, near the origin or towards "
        "the queries, such as often the first one, is an attention sink.",
        POINTS_HEADER,
        [row for one in shown for row in _point_rows(one.view, one.pair)],
    )


def points_of_head(one: Feature, trained: int, pairs: Sequence[int]) -> Picture:
    """Draw the points of all pairs of a head, or of some (Fig. 12 and 13)."""
    drawn = [pair for pair in pairs if pair < one.view.pairs] or range(one.view.pairs)
    panels = [
        _cloud(one, pair, trained, f"{pair}: {_rounded(one.turns[pair] * trained / TURN)} turns")
        for pair in drawn
    ]
    return Picture(
        f"offset_points_{one.head}",
        clouds(panels, small=len(panels) > 3),
        f"Queries and keys of {'these' if pairs else 'all'} rotary pairs of layer {one.view.layer} "
        f"head {one.view.head}, before the rotation, a {_each(one.view.step)}, by the pair's "
        "index and its turns within the training length. Each panel has its own scale; lines: the "
        "means. Slow pairs whose queries and keys point away from each other are offset features.",
        POINTS_HEADER,
        [row for pair in drawn for row in _point_rows(one.view, pair)],
    )


POINTS_HEADER = ("layer", "head", "pair", "token", "query_1", "query_2", "key_1", "key_2")


def _cloud(one: Feature, pair: int, trained: int, title: str) -> PairCloud:
    return PairCloud(title, *one.view.points(pair), float(one.turns[pair]) * trained)


def _point_rows(view: HeadView, pair: int) -> Iterator[tuple[float, ...]]:
    for number, values in enumerate(np.hstack(view.points(pair)).tolist()):
        yield (view.layer, view.head, pair, number * view.step, *values)


def _rounded(turns: float) -> str:
    return f"{turns:,.0f}" if turns >= 10 else f"{turns:.2g}"


def _each(step: int) -> str:
    return "point for each token" if step == 1 else f"point for one in {step} tokens"


def curves(features: OffsetFeatures, shown: Sequence[Feature]) -> Picture:
    """Draw the terms of pairs in the logit, and the sum without the feature (Fig. 4 and 6)."""
    C = features.context_length
    distances = np.unique(np.geomspace(1, C + 1, DISTANCES).astype(int)) - 1
    panels, rows = [], []
    for one in shown:
        at = one.view
        parts = contributions(features, at.layer, at.head, distances.tolist())
        panels.append(Contributions(one.name, distances, parts, one.pair))
        total = parts.sum(axis=0)
        lines = {"all pairs": total, f"all but pair {one.pair}": total - parts[one.pair]}
        lines |= {f"pair {pair}": part for pair, part in enumerate(parts)}
        rows += [
            (at.layer, at.head, name, distance, value)
            for name, values in lines.items()
            for distance, value in zip(distances.tolist(), values.tolist(), strict=True)
        ]
    return Picture(
        "offset_contributions",
        by_distance(panels, C),
        "What the means of rotary pairs add to the logit by distance. Left: every pair of the "
        "head, by its index, and dotted the feature in the title. Right: all pairs together, and "
        "all but the feature. What these two differ by is what the feature does to far tokens.",
        ("layer", "head", "curve", "distance", "part_of_logit"),
        rows,
    )


LONG = 0.9
"""Quantile of the radii above which a mean is called long."""


def stable_angles(stability: Stability, layers: int) -> Picture:
    """Draw circular variance by radius, of queries and of keys (Fig. 2)."""
    clouds = [
        HeadCloud(
            *(name, stability.layer[of], stability.radius[of], stability.variance[of]),
            *("radius of the mean", "circular variance of the angle"),
        )
        for name, of in (("queries", ~stability.of_keys), ("keys", stability.of_keys))
    ]
    return Picture(
        "offset_angle_stability",
        head_points(clouds, layers),
        "How much the angle of a rotary pair varies over all positions, before the rotation, by "
        "the radius of its mean: 0 where it never does, 1 where angles cancel. A point a head and "
        "pair, coloured by layer. Pairs with long means should lie below.",
        STABILITY_COLUMNS,
        list(zip(*(getattr(stability, name).tolist() for name in STABILITY_COLUMNS), strict=True)),
    )


def stability_findings(stability: Stability) -> list[str]:
    """Compare angles of the tenth of the pairs with the longest means with those of other pairs."""
    text = []
    for name, of in (("queries", ~stability.of_keys), ("keys", stability.of_keys)):
        radius, variance = stability.radius[of], stability.variance[of]
        long = radius > np.quantile(radius, LONG)
        if long.any():
            a, b = np.median(variance[long]), np.median(variance[~long])
            text.append(
                f"The tenth of the pairs of {name} with the longest means has a median circular "
                f"variance of {a:.2f}, the others {b:.2f}."
            )
    return text


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

    def findings(self, results: dict[str, OffsetFeatures]) -> list[str]:
        """Report how many large features are still within both bounds."""
        before = results[AS_TRAINED].recall[0]
        if not before.positives:
            return []
        within = ", ".join(
            f"{name} {percent(one.recall[0].lower)}"
            for name, one in results.items()
            if name != AS_TRAINED
        )
        return [
            f"At {self.length:,} tokens both bounds hold for these shares of the pairs of radius "
            f"{RADII[0]:g} or more: {within}; as trained, at {self.C:,}, {percent(before.lower)}."
        ]

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
                    *(percent(one.share), number(one.mean_lower_bound)),
                    *(percent(one.recall[0].upper), percent(one.recall[0].lower)),
                )
                for name, one in results.items()
            ],
        )

    def picture(self, features: OffsetFeatures) -> Picture:
        """Draw the first spectrum that rotates with lower bounds, and the large features as
        trained."""
        assert self.spectrum is not None
        large, pairs = features.key_radius >= RADII[0], len(self.spectrum.inv_freq)
        turns: list[Series] = []
        lower: list[Series] = []
        rows: list[tuple[str, int, float, float]] = []
        for number, name in enumerate(NAMES):
            length = self._at(name)
            limits = bounds(self._change(name, self.spectrum).at(length, self.C), length)
            turned = limits.inv_freq * length / TURN
            # Lines of some methods coincide: let neighbours differ in their dashes too.
            style = number + len(COLOURS) * (number % 3)
            for lines, y, shown in (
                (turns, turned, turned > 0),
                (lower, limits.angle, limits.possible),
            ):
                at = np.flatnonzero(shown)
                lines.append(Series(name, style, at.tolist(), y[at].tolist(), marked=False))
            rows += [
                (name, pair, *values)
                for pair, values in enumerate(
                    zip(turned.tolist(), limits.angle.tolist(), strict=True)
                )
            ]

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


def percent(share: float | None) -> str:
    """Format a share as a percentage; a dash for None."""
    return "–" if share is None else f"{share:.0%}"


def number(value: float | None) -> str:
    """Format with two decimals; a dash for None."""
    return "–" if value is None else f"{value:.2f}"
