"""Pictures of rotary offset features: of all pairs, and of the heads with the strongest (Rotary
Offset Features, Fig. 1, 4, 6 to 8 and 11 to 14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.head_view import HeadView
from trainer.analysis.offset_features import (
    COLUMNS,
    RADII,
    TURN,
    OffsetFeatures,
    contributions,
)
from trainer.analysis.studies.offset_figures import (
    Contributions,
    PairCloud,
    Radii,
    by_distance,
    clouds,
    radius_and_angle,
    small_clouds,
)
from trainer.analysis.studies.section import Picture
from trainer.plotting.maps import Scale, heat_maps

DISTANCES = 400
COLUMNS_OF_MAPS = 3
LOUDEST = 0.999
"""Quantile of the sizes of activations that the strongest colour stands for."""


@dataclass(frozen=True)
class Feature:
    """The pair of longest means of a head, one under the upper bound where there is any
    (``possible``). ``strength`` is the product of their lengths, ``turns`` radians a token of all
    pairs of the head."""

    possible: bool
    strength: float
    pair: int
    turns: Array
    view: HeadView

    @property
    def head(self) -> str:
        """Layer and head."""
        return f"L{self.view.layer}H{self.view.head}"

    @property
    def name(self) -> str:
        """Layer, head and pair."""
        return f"{self.head}, pair {self.pair}"


def first_possible(found: OffsetFeatures) -> list[int]:
    """The first pair under the upper bound, of every spectrum that has one."""
    firsts: dict[tuple[int, int], int] = {}
    at = zip(found.layer[found.possible], found.head[found.possible], strict=True)
    for key, pair in zip(at, found.pair[found.possible].tolist(), strict=True):
        firsts[key] = min(pair, firsts.get(key, pair))
    return sorted(set(firsts.values()))


def scatter(found: OffsetFeatures) -> Picture:
    """Radius and angle of every pair with the bounds (Fig. 8)."""
    moving = found.inv_freq > 0
    turns = found.inv_freq * found.context_length / TURN
    bounds = np.column_stack([found.pair, found.lower_bound])[found.possible]
    of_pairs = (found.pair, turns, found.key_radius, found.angle)
    lower = np.unique(bounds, axis=0).reshape(-1, 2).T
    return Picture(
        "offset_features",
        radius_and_angle(
            Radii(*(values[moving] for values in of_pairs)),
            RADII,
            first_possible(found),
            (lower[0], lower[1]),
        ),
        "Every rotary pair of every query head, on the left by its index, on the right by its "
        f"turns within C = {found.context_length:,} tokens, slow pairs to the right: the radius of "
        "its mean key, and the angle from its mean query to its mean key (rad), larger and darker "
        "with the radius. Dashed: the upper bound; orange: the lower bound; dotted: the radii of "
        "the table. Large pairs should lie right of the one and above the other.",
        COLUMNS,
        list(zip(*(getattr(found, name).tolist() for name in COLUMNS), strict=True)),
    )


def channels(shown: Sequence[Feature]) -> Picture:
    """Queries and keys of the heads along the text, every channel (Fig. 1)."""
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
    """Points of the features (Fig. 7)."""
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


def head_points(one: Feature, trained: int, pairs: Sequence[int]) -> Picture:
    """Points of all pairs of a head, or of some (Fig. 12 and 13)."""
    own = [pair for pair in pairs if pair < one.view.pairs] or range(one.view.pairs)
    panels = [
        _cloud(one, pair, trained, f"{pair}: {_rounded(one.turns[pair] * trained / TURN)} turns")
        for pair in own
    ]
    return Picture(
        f"offset_points_{one.head}",
        small_clouds(panels) if len(panels) > 3 else clouds(panels),
        f"Queries and keys of {'these' if pairs else 'all'} rotary pairs of layer {one.view.layer} "
        f"head {one.view.head}, before the rotation, a {_each(one.view.step)}, by the pair's "
        "index and its turns within the training length. Each panel has its own scale; lines: the "
        "means. Slow pairs whose queries and keys point away from each other are offset features.",
        POINTS_HEADER,
        [row for pair in own for row in _point_rows(one.view, pair)],
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


def curves(found: OffsetFeatures, shown: Sequence[Feature]) -> Picture:
    """What every pair adds to the logit, and the sum without the feature (Fig. 4 and 6)."""
    C = found.context_length
    distances = np.unique(np.geomspace(1, C + 1, DISTANCES).astype(int)) - 1
    panels, rows = [], []
    for one in shown:
        at = one.view
        parts = contributions(found, at.layer, at.head, distances.tolist())
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
