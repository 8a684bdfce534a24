"""Pictures of rotary offset features in one model.

They show all pairs, the strongest heads, and how stable angles are (Rotary Offset Features, Fig. 1,
2, 4, 6 to 8 and 11 to 13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from trainer.analysis.arrays import SIDES, Array
from trainer.analysis.offset_features.measure import (
    RADII,
    TURN,
    HeadView,
    OffsetFeatures,
    contributions,
)
from trainer.analysis.studies.section import Part, Picture, Rows, column_rows, long_rows
from trainer.plotting.lines import legend_above, panel_grid
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.points import HeadCloud, head_points, index_bar
from trainer.plotting.style import BLACK, BLUE, GRADED, GREEN, GREY, ORANGE, blank, paper_style

PAIR_INDEX = "pair index, from the fastest on"
DISTANCES = 400
COLUMNS_OF_MAPS = 3
LOUDEST = 0.999
"""Quantile of absolute activations that has the strongest colour."""
WIDE, MANY = 3, 8
"""Number of columns of large panels, and largest number of columns of small ones."""
LONG = 0.9
"""Quantile of the radii above which a mean is called long."""
_RADII = ListedColormap(colormaps["viridis_r"](np.linspace(0.12, 1, 256)))


def angle_axis(axes: Axes) -> None:
    """Let y be an angle from 0 to 2 pi."""
    axes.set_yticks(np.linspace(0, TURN, 5), ["0", "π/2", "π", "3π/2", "2π"])
    axes.set_ylim(0, TURN)


def legend_of_lines(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draw a legend of the named lines of some panels above all."""
    lines = [line for axes in panels for line in axes.lines]
    legend_above(figure, [line for line in lines if not str(line.get_label()).startswith("_")])


@dataclass(frozen=True)
class Feature:
    """The pair of a head with the longest means, among pairs under the upper bound if there are any
    (``possible``).

    ``strength``: product of the lengths of both means.
    """

    possible: bool
    strength: float
    pair: int
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
    heads = np.column_stack([features.layer, features.head])[features.possible]
    _, first = np.unique(heads, axis=0, return_index=True)
    return np.unique(features.pair[features.possible][first]).tolist()


def scatter(features: OffsetFeatures) -> Picture:
    """Draw radius and angle of every pair with the bounds (Fig. 8), by the pair's index and by its
    turns in the context length, slow pairs to the right."""
    moving = np.flatnonzero(features.inv_freq > 0)
    order = moving[np.argsort(features.key_radius[moving])]  # the longest means on top
    radius, angle, pair = features.key_radius[order], features.angle[order], features.pair[order]
    turns = features.inv_freq[order] * features.context_length / TURN
    bounds = np.column_stack([features.pair, features.lower_bound])[features.possible]
    with paper_style():
        figure = blank(4.4)
        (above, above_turns), (below, below_turns) = figure.subplots(
            2, 2, sharex="col", sharey="row"
        )
        below_turns.set_xscale("log")
        below_turns.invert_xaxis()
        for x, top, bottom in ((pair, above, below), (turns, above_turns, below_turns)):
            top.scatter(x, radius, s=5, color=BLUE, alpha=0.5, linewidths=0, rasterized=True)
            for threshold in RADII:
                top.axhline(threshold, color=GREY, linewidth=0.8, linestyle=":")
            size = 3 + 25 * radius / max(radius.max(), 1e-9)
            points = bottom.scatter(
                x, angle, c=radius, cmap=_RADII, s=size, linewidths=0, rasterized=True
            )
        above.set_ylabel("radius of the mean key")
        angle_axis(below)
        below.set_ylabel("angle φ, query to key (rad)")
        below.set_xlabel(PAIR_INDEX)
        below.locator_params(axis="x", integer=True)
        lower = np.unique(bounds, axis=0).reshape(-1, 2).T
        below.scatter(*lower, marker="_", s=18, color=ORANGE, linewidths=1.2)
        slow = np.geomspace(min(turns.min(), 0.5), 1, 200)
        below_turns.plot(slow, math.pi * (1 + slow), color=ORANGE, label="lower bound π + θC/2")
        below_turns.set_xlabel("turns within the context, θC/2π (logarithmic)")
        edge: dict[str, Any] = {"color": BLACK, "linewidth": 0.9, "linestyle": "--"}
        for axes in (above, below):
            for index in first_possible(features):
                axes.axvline(index - 0.5, **edge)
        for axes in (above_turns, below_turns):
            axes.axvline(1, **edge, label="upper bound 2π/C")
        legend_of_lines(figure, [below_turns])
        figure.colorbar(points, ax=figure.axes, label="radius of the mean key", aspect=30)
    return Picture(
        name="offset_features",
        figure=figure,
        caption=(
            "Every rotary pair of every query head, on the left by its index, on the right by its "
            f"turns within C = {features.context_length:,} tokens, slow pairs to the right: the "
            "radius of its mean key, and the angle from its mean query to its mean key (rad), "
            "larger and darker with the radius. Dashed: the upper bound; orange: the lower bound; "
            "dotted: the radii of the table. Large pairs should lie right of the upper bound and "
            "above the lower one."
        ),
        header=tuple(features.columns),
        rows=column_rows(features.columns.values()),
    )


def channels(shown: Sequence[Feature]) -> Picture:
    """Draw queries and keys of the heads along the text, every channel (Fig. 1)."""
    columns = min(COLUMNS_OF_MAPS, len(shown))
    maps = {
        f"{feature.head}, {name}": feature.view.maps[side]
        for start in range(0, len(shown), columns)
        for side, name in SIDES.items()
        for feature in shown[start : start + columns]
    }
    size = float(np.quantile(np.abs(np.concatenate([m.ravel() for m in maps.values()])), LOUDEST))
    view = shown[0].view
    return Picture(
        name="offset_channels",
        figure=heat_maps(
            maps,
            Scale("activation", -size, size, signed=True),
            x="token",
            y="channel",
            columns=columns,
            cell=(view.cell, 1),
        ),
        caption=(
            "Queries and keys before the rotation, every channel along the first text"
            + (f", means over {view.cell} tokens" if view.cell > 1 else "")
            + f". Of {2 * view.pairs} channels that rotate, m and m + {view.pairs} are pair m: an "
            "offset feature is two bands of one colour that far apart. Single tokens that break a "
            "band of the keys are attention sinks."
        ),
        header=("layer", "head", "of", "channel", "from_token", "activation"),
        rows=long_rows(
            {
                (feature.view.layer, feature.view.head, side): feature.view.maps[side]
                for feature in shown
                for side in SIDES
            },
            places=range(0, view.cell * view.maps["key"].shape[1], view.cell),
        ),
    )


POINTS_HEADER = ("layer", "head", "pair", "token", "query_1", "query_2", "key_1", "key_2")


def feature_points(shown: Sequence[Feature], trained: int) -> Picture:
    """Draw the points of the features (Fig. 7)."""
    kind = "under the upper bound" if shown[0].possible else "of these heads"
    return Picture(
        name="offset_feature_points",
        figure=_draw_clouds([(feature, feature.pair, feature.name) for feature in shown], trained),
        caption=(
            f"Queries and keys of the strongest pairs {kind}, before the rotation, a "
            f"{_each(shown[0].view.step)}; arrows: the mean query and key, green: how far the "
            "query turns within the training length. A key far from the others, near the origin or "
            "towards the queries, such as often the first one, is an attention sink."
        ),
        header=POINTS_HEADER,
        rows=[row for feature in shown for row in _point_rows(feature.view, feature.pair)],
    )


def points_of_head(feature: Feature, trained: int, pairs: Sequence[int]) -> Picture:
    """Draw the points of all pairs of a head, or of some (Fig. 12 and 13)."""
    view, turns = feature.view, feature.view.inv_freq * trained / TURN
    drawn = [pair for pair in pairs if pair < view.pairs] or range(view.pairs)
    panels = [(feature, pair, f"{pair}: {_rounded(turns[pair])} turns") for pair in drawn]
    return Picture(
        name=f"offset_points_{feature.head}",
        figure=_draw_clouds(panels, trained, small=len(panels) > 3),
        caption=(
            f"Queries and keys of {'these' if pairs else 'all'} rotary pairs of layer {view.layer} "
            f"head {view.head}, before the rotation, a {_each(view.step)}, by the pair's index and "
            "its turns within the training length. Each panel has its own scale; lines: the means. "
            "Slow pairs whose queries and keys point away from each other are offset features."
        ),
        header=POINTS_HEADER,
        rows=[row for pair in drawn for row in _point_rows(view, pair)],
    )


def _point_rows(view: HeadView, pair: int) -> Rows:
    points = np.hstack(view.points(pair)).tolist()
    return [(view.layer, view.head, pair, i * view.step, *point) for i, point in enumerate(points)]


def _rounded(turns: float) -> str:
    return f"{turns:,.0f}" if turns >= 10 else f"{turns:.2g}"


def _each(step: int) -> str:
    return "point for each token" if step == 1 else f"point for one in {step} tokens"


def _draw_clouds(
    panels: Sequence[tuple[Feature, int, str]], trained: int, *, small: bool = False
) -> Figure:
    """Draw points of pairs in their plane, with the means and the rotation as an arc.

    ``panels``: a head, a pair and a title each. ``small``: for the many pairs of a head.
    """
    columns = min(MANY, math.ceil(math.sqrt(len(panels)))) if small else min(WIDE, len(panels))
    rows = math.ceil(len(panels) / columns)
    with paper_style():
        figure = blank(0.4 + (6.6 / columns if small else 2.3) * rows)
        grid = panel_grid(figure, len(panels), columns, x="first channel", y="second channel")
        for axes, (feature, pair, title) in zip(grid, panels, strict=True):
            turned = float(feature.view.inv_freq[pair]) * trained
            _draw_cloud(axes, *feature.view.points(pair), turned, small=small)
            axes.set_title(title, pad=2 if small else 3, fontsize=6 if small else 8)
        legend_of_lines(figure, grid[:1])
    return figure


def _draw_cloud(axes: Axes, query: Array, key: Array, turned: float, *, small: bool) -> None:
    """Draw queries and keys ``[T, 2]``; ``turned``: rotation within the context length, radians."""
    look: dict[str, Any] = {"alpha": 0.35, "linewidths": 0, "rasterized": True}
    for points, colour, name in ((query, BLUE, "queries"), (key, ORANGE, "keys")):
        x, y = points.T
        axes.scatter(x, y, s=0.6 if small else 2, color=colour, **look)
        axes.plot([], [], "o", markersize=4, color=colour, alpha=0.6, label=name)
    for points, colour in ((query, BLUE), (key, ORANGE)):
        mean = points.mean(axis=0)
        if small:
            axes.plot(*zip((0, 0), mean, strict=True), color=BLACK, linewidth=0.8)
        else:
            arrow = {"arrowstyle": "->", "color": BLACK, "linewidth": 1.6}
            axes.annotate("", mean, (0, 0), arrowprops=arrow)
        axes.plot(*mean, "o", markersize=2 if small else 4, color=colour, markeredgecolor=BLACK,
                  markeredgewidth=0.4 if small else 1)  # fmt: skip
    start = math.degrees(math.atan2(*query.mean(axis=0)[::-1]))
    size = 1.2 * float(np.hypot(*query.mean(axis=0)))
    end = start + min(math.degrees(turned), 360)
    width = 0.9 if small else 1.4
    arc = Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN, linewidth=width)
    axes.add_patch(arc)
    axes.plot([], [], color=GREEN, label="turn of the query within C")
    star: dict[str, Any] = {"markeredgecolor": BLACK, "markeredgewidth": 0.5}
    star |= {"markersize": 5 if small else 8, "label": "key of the first token"}
    axes.plot(*key[0], "*", color=ORANGE, **star)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.axvline(0, color=GREY, linewidth=0.5)
    axes.grid(visible=False)
    axes.set_aspect("equal", adjustable="datalim")
    if small:
        axes.tick_params(labelsize=5, length=1.5, pad=1)
        axes.locator_params(nbins=3)


def curves(features: OffsetFeatures, shown: Sequence[Feature]) -> Picture:
    """Draw the terms of pairs in the logit, and the sum without the feature (Fig. 4 and 6)."""
    C = features.context_length
    distances = np.unique(np.geomspace(1, C + 1, DISTANCES).astype(int)) - 1
    terms = [
        contributions(features, feature.view.layer, feature.view.head, distances.tolist())
        for feature in shown
    ]
    rows: Rows = []
    for feature, parts in zip(shown, terms, strict=True):
        total = parts.sum(axis=0)
        lines = {"all pairs": total, f"all but pair {feature.pair}": total - parts[feature.pair]}
        lines |= {f"pair {pair}": part for pair, part in enumerate(parts)}
        view = feature.view
        named = {(view.layer, view.head, name): line for name, line in lines.items()}
        rows += long_rows(named, places=distances.tolist())
    return Picture(
        name="offset_contributions",
        figure=_draw_terms(shown, terms, distances, C),
        caption=(
            "Terms of the logit from the means of rotary pairs, by distance. Left: every pair of "
            "the head, by its index, and dotted the feature in the title. Right: all pairs "
            "together, and all but the feature. The difference between these two is the feature's "
            "effect on far tokens."
        ),
        header=("layer", "head", "curve", "distance", "part_of_logit"),
        rows=rows,
    )


def _draw_terms(
    shown: Sequence[Feature], terms: Sequence[Array], distances: Array, context_length: int
) -> Figure:
    """Draw a row for each head: the terms ``[pairs, distances]`` of its pairs, and their sum with
    and without the feature."""
    pairs = max(map(len, terms))
    colours = ScalarMappable(Normalize(0, max(pairs - 1, 1)), GRADED)
    with paper_style():
        figure = blank(0.6 + 1.8 * len(shown))
        grid = figure.subplots(len(shown), 2, sharex=True, squeeze=False)
        for (by_pair, sums), feature, parts in zip(grid, shown, terms, strict=True):
            x = distances + 1
            lines = LineCollection(
                [np.column_stack([x, part]) for part in parts],
                colors=colours.to_rgba(np.arange(len(parts))),
                linewidths=0.8,
                rasterized=True,
            )
            by_pair.add_collection(lines)
            by_pair.autoscale_view()
            term, total = parts[feature.pair], parts.sum(axis=0)
            by_pair.plot(x, term, color=BLACK, linestyle=":", label="the feature")
            sums.plot(x, total, color=BLACK, label="all pairs")
            sums.plot(x, total - term, color=BLUE, linestyle="--", label="all but the feature")
            by_pair.set_title(feature.name, pad=3, loc="left")
            by_pair.set_ylabel("part of the logit")
            for axes in (by_pair, sums):
                axes.axhline(0, color=GREY, linewidth=0.5)
                axes.axvline(context_length, color=GREY, linewidth=0.8, linestyle="--")
                axes.set_xscale("log")
        figure.supxlabel("distance between query and key + 1 (tokens, logarithmic)", fontsize=8)
        legend_of_lines(figure, grid[0])
        index_bar(figure, colours, list(grid.flat), "pair index", aspect=30)
    return figure


def stability_part(stability: Mapping[str, Array], layers: int) -> Part:
    """Draw circular variance by radius (Fig. 2), and compare the tenth of pairs with the longest
    means with the others.

    ``stability``: see :meth:`AngleStability.result`.
    """
    clouds, findings = [], []
    for name, of_keys in (("queries", False), ("keys", True)):
        among = stability["of_keys"] == of_keys
        layer, radius, variance = (
            stability[column][among] for column in ("layer", "radius", "variance")
        )
        labels = ("radius of the mean", "circular variance of the angle")
        clouds.append(HeadCloud(layer, radius, variance, *labels, name))
        long = radius > np.quantile(radius, LONG)
        if long.any():
            findings.append(
                f"The tenth of the pairs of {name} with the longest means has a median circular "
                f"variance of {np.median(variance[long]):.2f}, the others "
                f"{np.median(variance[~long]):.2f}."
            )
    picture = Picture(
        name="offset_angle_stability",
        figure=head_points(clouds, layers),
        caption=(
            "How much the angle of a rotary pair varies over all positions, before the rotation, "
            "by the radius of its mean: 0 if it never varies, 1 if angles cancel. A point a head "
            "and pair, coloured by layer. Pairs with long means should lie below."
        ),
        header=tuple(stability),
        rows=column_rows(stability.values()),
    )
    return Part(tuple(findings), (picture,))


def percent(share: float | None) -> str:
    """Format a share as a percentage; a dash for None."""
    return "–" if share is None else f"{share:.0%}"


def number(value: float | None) -> str:
    """Format with two decimals; a dash for None."""
    return "–" if value is None else f"{value:.2f}"
