"""Drawings of rotary offset features: all pairs, single heads, and pairs in two models."""

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

from trainer.plotting.lines import legend_above, trim
from trainer.plotting.points import graded_points, index_bar
from trainer.plotting.style import (
    BLACK,
    BLUE,
    GRADED,
    GREEN,
    GREY,
    ORANGE,
    blank,
    paper_style,
)

Array = np.ndarray
PAIR_INDEX = "pair index, from the fastest on"
_RADII = ListedColormap(colormaps["viridis_r"](np.linspace(0.12, 1, 256)))


def angle_axis(axes: Axes) -> None:
    """Let y be an angle from 0 to 2 pi."""
    axes.set_yticks(np.linspace(0, 2 * math.pi, 5), ["0", "π/2", "π", "3π/2", "2π"])
    axes.set_ylim(0, 2 * math.pi)


def legend_of_lines(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draw a legend of the named lines of some panels above all."""
    named = [
        one for axes in panels for one in axes.lines if not str(one.get_label()).startswith("_")
    ]
    legend_above(figure, named)


@dataclass(frozen=True)
class Radii:
    """Rotary pairs of heads, ``[n]`` each.

    ``pair``: index of the pair; ``turns``: turns within the context length; ``radius``: length of
    the mean key; ``angle``: from the mean query to the mean key, radians.
    """

    pair: Array
    turns: Array
    radius: Array
    angle: Array


def radius_and_angle(
    features: Radii, radii: Sequence[float], first: Sequence[int], lower: tuple[Array, Array]
) -> Figure:
    """Draw every pair by its index, and by its turns in the context length, slow pairs to the
    right.

    Args:
        features: the pairs.
        radii: thresholds, drawn as lines.
        first: indices of the first pair under the upper bound, one for every spectrum.
        lower: indices of pairs and their lower bounds, radians.
    """
    order = np.argsort(features.radius)
    radius, angle = features.radius[order], features.angle[order]
    pair, turns = features.pair[order], features.turns[order]
    with paper_style():
        figure = blank(4.4)
        (above, above_turns), (below, below_turns) = figure.subplots(
            2, 2, sharex="col", sharey="row"
        )
        below_turns.set_xscale("log")
        below_turns.invert_xaxis()
        for x, top, bottom in ((pair, above, below), (turns, above_turns, below_turns)):
            top.scatter(x, radius, s=5, color=BLUE, alpha=0.5, linewidths=0, rasterized=True)
            for threshold in radii:
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
        below.scatter(*lower, marker="_", s=18, color=ORANGE, linewidths=1.2)
        slow = np.geomspace(min(turns.min(), 0.5), 1, 200)
        below_turns.plot(slow, math.pi * (1 + slow), color=ORANGE, label="lower bound π + θC/2")
        below_turns.set_xlabel("turns within the context, θC/2π (logarithmic)")
        edge = {"color": BLACK, "linewidth": 0.9, "linestyle": "--"}
        for axes in (above, below):
            for index in first:
                axes.axvline(index - 0.5, **edge)
        for axes in (above_turns, below_turns):
            axes.axvline(1, **edge, label="upper bound 2π/C")
        legend_of_lines(figure, [below_turns])
        figure.colorbar(points, ax=figure.axes, label="radius of the mean key", aspect=30)
    return figure


WIDE, MANY = 3, 8
"""Number of columns of large panels, and largest number of columns of small ones."""


@dataclass(frozen=True)
class PairCloud:
    """Queries and keys ``[T, 2]`` of one pair before the rotation.

    ``turned``: rotation within the context length, radians.
    """

    title: str
    query: Array
    key: Array
    turned: float


def clouds(panels: Sequence[PairCloud], *, small: bool = False) -> Figure:
    """Draw points of pairs in their plane, with the means and the rotation as an arc.

    ``small``: for the many pairs of a head; each panel has its own scale.
    """
    columns = min(MANY, math.ceil(math.sqrt(len(panels)))) if small else min(WIDE, len(panels))
    rows = math.ceil(len(panels) / columns)
    with paper_style():
        figure = blank(0.4 + (6.6 / columns if small else 2.3) * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, cloud in zip(grid.flat, panels, strict=False):
            _draw_cloud(axes, cloud, small=small)
        trim(list(grid.flat), len(panels))
        figure.supxlabel("first channel", fontsize=8)
        figure.supylabel("second channel", fontsize=8)
        legend_of_lines(figure, grid[0, :1])
    return figure


def _draw_cloud(axes: Axes, cloud: PairCloud, *, small: bool) -> None:
    for points, colour, name in ((cloud.query, BLUE, "queries"), (cloud.key, ORANGE, "keys")):
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=0.6 if small else 2,
            color=colour,
            alpha=0.35,
            linewidths=0,
            rasterized=True,
        )
        axes.plot([], [], "o", markersize=4, color=colour, alpha=0.6, label=name)
    for points, colour in ((cloud.query, BLUE), (cloud.key, ORANGE)):
        mean = points.mean(axis=0)
        if small:
            axes.plot(*zip((0, 0), mean, strict=True), color=BLACK, linewidth=0.8)
        else:
            arrow = {"arrowstyle": "->", "color": BLACK, "linewidth": 1.6}
            axes.annotate("", mean, (0, 0), arrowprops=arrow)
        axes.plot(*mean, "o", markersize=2 if small else 4, color=colour, markeredgecolor=BLACK,
                  markeredgewidth=0.4 if small else 1)  # fmt: skip
    start = math.degrees(math.atan2(*cloud.query.mean(axis=0)[::-1]))
    size = 1.2 * float(np.hypot(*cloud.query.mean(axis=0)))
    end = start + min(math.degrees(cloud.turned), 360)
    width = 0.9 if small else 1.4
    arc = Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN, linewidth=width)
    axes.add_patch(arc)
    axes.plot([], [], color=GREEN, label="turn of the query within C")
    star: dict[str, Any] = {
        "markeredgecolor": BLACK,
        "markeredgewidth": 0.5,
        "markersize": 5 if small else 8,
    }
    axes.plot(*cloud.key[0], "*", color=ORANGE, label="key of the first token", **star)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.axvline(0, color=GREY, linewidth=0.5)
    axes.grid(visible=False)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(cloud.title, pad=2 if small else 3, fontsize=6 if small else 8)
    if small:
        axes.tick_params(labelsize=5, length=1.5, pad=1)
        axes.locator_params(nbins=3)


@dataclass(frozen=True)
class Contributions:
    """Terms of pairs in a logit, ``parts`` ``[pairs, n]`` at ``distances`` ``[n]``; ``pair``: the
    pair that is left out of the second sum."""

    title: str
    distances: Array
    parts: Array
    pair: int


def by_distance(heads: Sequence[Contributions], context_length: int) -> Figure:
    """Draw a row for each head: every pair, and their sum with and without one of them."""
    pairs = max(len(head.parts) for head in heads)
    colours = ScalarMappable(Normalize(0, max(pairs - 1, 1)), GRADED)
    with paper_style():
        figure = blank(0.6 + 1.8 * len(heads))
        grid = figure.subplots(len(heads), 2, sharex=True, squeeze=False)
        for (left, right), head in zip(grid, heads, strict=True):
            x = head.distances + 1
            lines = [np.column_stack([x, part]) for part in head.parts]
            left.add_collection(
                LineCollection(
                    lines,
                    colors=colours.to_rgba(np.arange(len(lines))),
                    linewidths=0.8,
                    rasterized=True,
                )
            )
            left.autoscale_view()
            feature = head.parts[head.pair]
            left.plot(x, feature, color=BLACK, linestyle=":", label="the feature")
            total = head.parts.sum(axis=0)
            right.plot(x, total, color=BLACK, label="all pairs")
            right.plot(x, total - feature, color=BLUE, linestyle="--", label="all but the feature")
            left.set_title(head.title, pad=3, loc="left")
            left.set_ylabel("part of the logit")
            for axes in (left, right):
                axes.axhline(0, color=GREY, linewidth=0.5)
                axes.axvline(context_length, color=GREY, linewidth=0.8, linestyle="--")
                axes.set_xscale("log")
        figure.supxlabel("distance between query and key + 1 (tokens, logarithmic)", fontsize=8)
        legend_of_lines(figure, grid[0])
        index_bar(figure, colours, list(grid.flat), "pair index", aspect=30)
    return figure


_BOUND_DASHES = ("--", ":")


@dataclass(frozen=True)
class Changes:
    """Pairs that two models share, ``[n]`` each.

    ``radius``: change in length of the mean key. ``angle``: change of its angle to the query in
    radians, NaN if the pair is too small for a meaningful angle.
    """

    layer: Array
    pair: Array
    radius: Array
    angle: Array


def changes_by_pair(changes: Changes, first: Mapping[str, Sequence[int]]) -> Figure:
    """Draw the change of radii above that of angles, a point for each head, coloured by layer.

    ``first``: by model, indices of the first pair under its upper bound.
    """
    layers = max(int(changes.layer.max()), 1)
    with paper_style():
        figure = blank(4.2)
        grid = figure.subplots(2, 1, sharex=True)
        # Layers side by side within the width of a pair.
        x = changes.pair + 0.6 * (changes.layer / layers - 0.5)
        for axes, values in zip(grid, (changes.radius, changes.angle), strict=True):
            points = graded_points(
                axes, x, values, changes.layer, layers + 1, size=4, alpha=0.7, rasterized=True
            )
            axes.axhline(0, color=GREY, linewidth=0.6)
            for (name, indices), dash in zip(first.items(), _BOUND_DASHES, strict=True):
                for number, index in enumerate(indices):
                    label = f"upper bound, {name}" if not number else None
                    style = {"color": BLACK, "linewidth": 0.9, "linestyle": dash}
                    axes.axvline(index - 0.5, label=label, **style)
        pairs = np.unique(changes.pair)
        middle = [np.median(changes.radius[changes.pair == pair]) for pair in pairs]
        grid[0].plot(pairs, middle, color=ORANGE, linewidth=1.4, label="median over heads")
        grid[0].set_ylabel("change of the radius")
        grid[1].set_ylabel("change of the angle φ (rad)")
        grid[1].set_xlabel(PAIR_INDEX)
        grid[1].locator_params(axis="x", integer=True)
        legend_of_lines(figure, grid[:1])
        index_bar(figure, points, list(grid), "layer", aspect=30)
    return figure


@dataclass(frozen=True)
class OnePair:
    """One pair index of all heads, ``radius`` and ``angle`` ``[2, n]`` of two models.

    ``lower``: lower bounds of both models in radians, None if the pair is not under the upper
    bound.
    """

    pair: int
    radius: Array
    angle: Array
    lower: tuple[float | None, float | None]


def pairs_in_both(panels: Sequence[OnePair], names: Sequence[str]) -> Figure:
    """Draw radius and angle of every head in both models, joined by a line."""
    with paper_style():
        figure = blank(2.9)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, panel in zip(grid, panels, strict=True):
            # Draw no line for pairs that pass 2 pi: it would cross the whole panel.
            near = np.abs(np.diff(panel.angle, axis=0)[0]) < math.pi
            ends = np.stack([panel.radius, panel.angle], axis=-1)[:, near]
            moves = LineCollection(list(ends.transpose(1, 0, 2)), colors=GREY, rasterized=True)
            moves.set(linewidths=0.4, alpha=0.5)
            axes.add_collection(moves)
            for model, (name, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
                at = panel.radius[model], panel.angle[model]
                look = {"s": 7, "alpha": 0.7, "linewidths": 0, "rasterized": True}
                axes.scatter(*at, color=colour, label=name, **look)
                if (bound := panel.lower[model]) is not None:
                    axes.axhline(bound, color=colour, linewidth=1, linestyle=_BOUND_DASHES[model])
            axes.set_title(f"pair {panel.pair}", pad=3)
            axes.set_xlabel("radius of the mean key")
            axes.set_xlim(left=0)
        angle_axis(grid[0])
        grid[0].set_ylabel("angle φ, query to key (rad)")
        handles = grid[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    return figure
