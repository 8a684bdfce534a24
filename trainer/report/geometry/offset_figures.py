"""Figures of rotary offset features: radii and angles with their bounds, points of a pair, and what
pairs add to a logit by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from trainer.report.plotting import blank, paper_style

Array = np.ndarray
BLUE, ORANGE, GREEN, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#707070"
_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_COLOURS = (BLACK, BLUE, ORANGE, GREEN, "#CC79A7")
_RADII = ListedColormap(colormaps["viridis_r"](np.linspace(0.12, 1, 256)))
_ANGLES = ([0, math.pi / 2, math.pi, 3 * math.pi / 2, 2 * math.pi], ["0", "π/2", "π", "3π/2", "2π"])


def radius_and_angle(turns: Array, radius: Array, angle: Array, radii: Sequence[float]) -> Figure:
    """Every pair by how often it turns in the context length, slow ones to the right.

    Args:
        turns: theta C / (2 pi), ``[n]``.
        radius: of the mean key.
        angle: from the mean query to the mean key, radians.
        radii: thresholds, drawn as lines.
    """
    order = np.argsort(radius)
    turns, radius, angle = turns[order], radius[order], angle[order]
    with paper_style():
        figure = blank(4.4)
        above, below = figure.subplots(2, 1, sharex=True)
        below.set_xscale("log")
        below.invert_xaxis()
        above.scatter(turns, radius, s=5, color=BLUE, alpha=0.5, linewidths=0, rasterized=True)
        for threshold in radii:
            above.axhline(threshold, color=GREY, linewidth=0.8, linestyle=":")
        above.set_ylabel("radius of the mean key")
        points = below.scatter(
            turns,
            angle,
            c=radius,
            cmap=_RADII,
            s=3 + 25 * radius / max(radius.max(), 1e-9),
            linewidths=0,
            rasterized=True,
        )
        slow = np.geomspace(min(turns.min(), 0.5), 1, 200)
        below.plot(slow, math.pi * (1 + slow), color=ORANGE, label="lower bound π + θC/2")
        below.set_yticks(*_ANGLES)
        below.set_ylim(0, 2 * math.pi)
        below.set_ylabel("angle φ, query to key (rad)")
        below.set_xlabel("turns within the context length, θC/2π (logarithmic)")
        for axes in (above, below):
            axes.axvline(1, color=BLACK, linewidth=0.9, linestyle="--", label="upper bound 2π/C")
        figure.legend(*below.get_legend_handles_labels(), loc="outside upper right", ncols=2)
        figure.colorbar(points, ax=[above, below], label="radius of the mean key", aspect=30)
    return figure


def radius_and_variance(radius: Array, variance: Array, of_keys: Array) -> Figure:
    """Circular variance of the angles of every pair by the length of its mean, all ``[n]``."""
    with paper_style():
        figure = blank(2.6)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, of, colour, name in zip(
            panels, (~of_keys, of_keys), (BLUE, ORANGE), ("queries", "keys"), strict=True
        ):
            shown = {"s": 4, "alpha": 0.4, "linewidths": 0, "rasterized": True}
            axes.scatter(radius[of], variance[of], color=colour, **shown)
            axes.set_xlabel(f"radius of the mean, {name}")
        panels[0].set_ylim(0, 1)
        panels[0].set_ylabel("circular variance of the angle")
    return figure


@dataclass(frozen=True)
class Cloud:
    """Queries and keys ``[T, 2]`` of one pair before the rotation, which then turns by ``turned``
    radians within the context length."""

    title: str
    query: Array
    key: Array
    turned: float


def clouds(panels: Sequence[Cloud]) -> Figure:
    """Points of pairs in their plane, with arrows to the means; the arc is the whole rotation."""
    with paper_style():
        figure = blank(2.6)
        for axes, cloud in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
        ):
            _cloud(axes, cloud)
        axes = figure.axes[0]
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, markerscale=4
        )
    return figure


def _cloud(axes: Axes, cloud: Cloud) -> None:
    for points, colour, name in ((cloud.query, BLUE, "queries"), (cloud.key, ORANGE, "keys")):
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=2,
            color=colour,
            alpha=0.35,
            linewidths=0,
            label=name,
            rasterized=True,
        )
    for points, colour in ((cloud.query, BLUE), (cloud.key, ORANGE)):
        mean = points.mean(axis=0)
        arrow = {"arrowstyle": "->", "color": BLACK, "linewidth": 1.6}
        axes.annotate("", mean, (0, 0), arrowprops=arrow)
        axes.plot(*mean, "o", markersize=4, color=colour, markeredgecolor=BLACK)
    start = math.degrees(math.atan2(*cloud.query.mean(axis=0)[::-1]))
    size = 1.2 * float(np.hypot(*cloud.query.mean(axis=0)))
    end = start + min(math.degrees(cloud.turned), 360)
    axes.add_patch(Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN, linewidth=1.4))
    axes.plot([], [], color=GREEN, label="turn of the query within C")
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.axvline(0, color=GREY, linewidth=0.5)
    axes.grid(visible=False)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(cloud.title, pad=3)
    axes.set_xlabel("first channel")
    axes.set_ylabel("second channel")


def by_distance(
    panels: Mapping[str, tuple[Array, Mapping[str, Array]]], context_length: int
) -> Figure:
    """What pairs add to the logit: by title, distances ``[n]`` and curves ``[n]`` by name.

    The first two curves are drawn thick: all pairs, and all but the strongest.
    """
    with paper_style():
        figure = blank(0.4 + 1.9 * len(panels))
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        for axes, (title, (distances, curves)) in zip(grid.flat, panels.items(), strict=True):
            for number, (name, values) in enumerate(curves.items()):
                axes.plot(
                    *(distances + 1, values),
                    label=name,
                    color=_COLOURS[number % len(_COLOURS)],
                    linestyle=_DASHES[number % len(_DASHES)],
                    linewidth=1.2,
                )
            axes.axhline(0, color=GREY, linewidth=0.5)
            axes.axvline(context_length, color=GREY, linewidth=0.8, linestyle="--")
            axes.set_xscale("log")
            axes.set_title(title, pad=3, loc="left")
            axes.set_ylabel("part of the logit")
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        grid.flat[-1].set_xlabel("distance between query and key + 1 (tokens, logarithmic)")
    return figure


@dataclass(frozen=True)
class Method:
    """A spectrum at a length: ``turns`` within it and lower bounds ``angle`` ``[pairs]``."""

    name: str
    turns: Array
    angle: Array


def extended_bounds(methods: Sequence[Method], pair: Array, angle: Array) -> Figure:
    """Turns and lower bounds of every pair by method, over the angles of large features.

    ``pair``, ``angle``: of the features, ``[n]``.
    """
    with paper_style():
        figure = blank(2.9)
        left, right = figure.subplots(1, 2)
        right.scatter(
            *(pair, angle), s=8, color="#b0b0b0", linewidths=0, label="large keys", rasterized=True
        )
        for number, one in enumerate(methods):
            style = {"color": _COLOURS[number], "linestyle": _DASHES[number], "label": one.name}
            index = np.arange(len(one.turns))
            moving = one.turns > 0
            left.plot(index[moving], one.turns[moving], **style)
            slow = moving & (one.turns < 1)
            right.plot(index[slow], one.angle[slow], **style)
        left.axhline(1, color=GREY, linewidth=0.9, linestyle="--")
        left.set_yscale("log")
        left.set_ylabel("turns within the length")
        right.set_yticks(*_ANGLES)
        right.set_ylim(0, 2 * math.pi)
        right.set_ylabel("angle φ and lower bounds (rad)")
        for axes in (left, right):
            axes.set_xlim(-0.5, len(methods[0].turns) - 0.5)
            axes.set_xlabel("pair index, from the fastest on")
        figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure
