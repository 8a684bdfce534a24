"""Figures of the rotary pairs of single heads: their points, and what they add to a logit by
distance (Rotary Offset Features, Fig. 4, 6, 7, 12 and 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from trainer.report.geometry.offset_figures import BLACK, BLUE, GREEN, GREY, ORANGE
from trainer.report.plotting import GRADED, blank, paper_style, whole_ticks

Array = np.ndarray
WIDE, MANY = 3, 8
"""Columns of large panels, and the most of small ones."""


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
    rows = math.ceil(len(panels) / WIDE)
    with paper_style():
        figure = blank(0.3 + 2.3 * rows)
        grid = figure.subplots(rows, min(WIDE, len(panels)), squeeze=False)
        for axes, cloud in zip(grid.flat, panels, strict=False):
            _cloud(axes, cloud)
            axes.set_xlabel("first channel")
            axes.set_ylabel("second channel")
        _finish(figure, grid, len(panels))
    return figure


def small_clouds(panels: Sequence[Cloud]) -> Figure:
    """As :func:`clouds` for the many pairs of a head, each panel with its own scale."""
    columns = min(MANY, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    with paper_style():
        figure = blank(0.4 + 6.6 / columns * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, cloud in zip(grid.flat, panels, strict=False):
            _cloud(axes, cloud, small=True)
        figure.supxlabel("first channel", fontsize=8)
        figure.supylabel("second channel", fontsize=8)
        _finish(figure, grid, len(panels))
    return figure


def _finish(figure: Figure, grid: Array, used: int) -> None:
    for axes in grid.flat[used:]:
        axes.remove()
    figure.legend(
        *grid.flat[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )


def _cloud(axes: Axes, cloud: Cloud, *, small: bool = False) -> None:
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
    """What pairs add to a logit, ``parts`` ``[pairs, n]`` at ``distances`` ``[n]``; ``pair`` is the
    one that is taken out."""

    title: str
    distances: Array
    parts: Array
    pair: int


def by_distance(heads: Sequence[Contributions], context_length: int) -> Figure:
    """A row a head: every pair, and their sum with and without one of them."""
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
            own = head.parts[head.pair]
            left.plot(x, own, color=BLACK, linestyle=":", label="the feature")
            total = head.parts.sum(axis=0)
            right.plot(x, total, color=BLACK, label="all pairs")
            right.plot(x, total - own, color=BLUE, linestyle="--", label="all but the feature")
            left.set_title(head.title, pad=3, loc="left")
            left.set_ylabel("part of the logit")
            for axes in (left, right):
                axes.axhline(0, color=GREY, linewidth=0.5)
                axes.axvline(context_length, color=GREY, linewidth=0.8, linestyle="--")
                axes.set_xscale("log")
        figure.supxlabel("distance between query and key + 1 (tokens, logarithmic)", fontsize=8)
        handles, labels = (
            [entry for axes in grid[0] for entry in axes.get_legend_handles_labels()[which]]
            for which in (0, 1)
        )
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        bar = figure.colorbar(colours, ax=list(grid.flat), label="pair index", aspect=30)
        whole_ticks(bar.locator)
    return figure
