"""Scatter plots coloured by an index or by a group, and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trainer.plotting.lines import panel_grid
from trainer.plotting.style import (
    BLUE,
    GRADED,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    WIDTH,
    blank,
    paper_style,
    whole_ticks,
)

Array = np.ndarray
KEYS, QUERIES = ORANGE, (BLUE, SKY, GREEN, PINK)
"""Colours of keys, and of the query heads that read them."""
MANY = 2000
"""Points of a panel above which they are small and drawn as a bitmap."""


@dataclass(frozen=True)
class HeadCloud:
    """Points ``x``, ``y`` ``[n]`` of heads, with the ``layer`` of each.

    ``diagonal``: whether the line x = y is drawn. ``level``: y of a horizontal line, if any.
    """

    layer: Array
    x: Array
    y: Array
    x_label: str
    y_label: str
    title: str = ""
    diagonal: bool = False
    level: float | None = None

    @classmethod
    def of_layers(
        cls, x: Array, y: Array, x_label: str, y_label: str, title: str = "", diagonal: bool = False
    ) -> HeadCloud:
        """Return the points of all heads from arrays ``[layers, heads]``."""
        layer = np.repeat(np.arange(len(x)), x.shape[1])
        return cls(layer, x.ravel(), y.ravel(), x_label, y_label, title, diagonal)


@dataclass(frozen=True)
class GroupCloud:
    """Points ``[n, 2]`` by the name of their group, and the position of the origin.

    The first group has the colour of keys, the others have colours of queries.
    """

    title: str
    groups: Mapping[str, Array]
    origin: Array


def graded_points(
    axes: Axes, x: Array, y: Array, index: Array, count: int, *, size: float, **look: Any
) -> PathCollection:
    """Draw points coloured by an index below ``count``."""
    return axes.scatter(
        x,
        y,
        c=index,
        cmap=GRADED,
        norm=Normalize(0, max(count - 1, 1)),
        s=size,
        linewidths=0,
        **{"alpha": 0.85, **look},
    )


def index_bar(
    figure: Figure,
    colours: ScalarMappable,
    axes: Sequence[Axes],
    label: str,
    names: Sequence[str] = (),
    **look: Any,
) -> None:
    """Draw an opaque colour bar with ticks at whole numbers, or with the names of all of them."""
    bar = figure.colorbar(colours, ax=list(axes), label=label, **look)
    if names:
        bar.set_ticks(range(len(names)), labels=names)
    else:
        whole_ticks(bar.locator)
    if bar.solids is not None:
        bar.solids.set_alpha(1)


def head_points(clouds: Sequence[HeadCloud], layers: int) -> Figure:
    """Draw a panel for each cloud, its points coloured by layer; many points are drawn small."""
    many = max(len(cloud.x) for cloud in clouds) > MANY
    look: dict[str, Any] = {"size": 4, "alpha": 0.5} if many else {"size": 16}
    with paper_style():
        figure = blank(2.8, WIDTH * (0.6 if len(clouds) == 1 else 1))
        grid = list(figure.subplots(1, len(clouds), squeeze=False)[0])
        for axes, cloud in zip(grid, clouds, strict=True):
            if cloud.diagonal:
                both = np.concatenate([cloud.x, cloud.y])
                ends = [both.min(), both.max()]
                axes.plot(ends, ends, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
            if cloud.level is not None:
                axes.axhline(cloud.level, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
            points = graded_points(
                axes, cloud.x, cloud.y, cloud.layer, layers, rasterized=many, **look
            )
            axes.grid(visible=True, axis="both")
            axes.locator_params(axis="x", nbins=5)
            axes.set_title(cloud.title, pad=4)
            axes.set_xlabel(cloud.x_label)
            axes.set_ylabel(cloud.y_label)
        index_bar(figure, points, grid, "layer", pad=0.02, aspect=25)
    return figure


def pair_scatter(
    panels: Mapping[str, Mapping[str, Array]],
    thresholds: Mapping[str, Sequence[float]],
    x_label: str,
    colours: tuple[str, Sequence[str]] = ("head", ()),
) -> Figure:
    """Draw entropies ``[heads, pairs]`` over the pair index, coloured by head.

    ``panels``: by measure (a row of panels), then by layer (a column). ``thresholds``: dashed lines
    of every measure. ``colours``: label of the rows of an array, and their names if they have any.
    """
    columns = max(map(len, panels.values()))
    heads = max(len(values) for row in panels.values() for values in row.values())
    with paper_style():
        figure = blank(0.5 + 1.75 * len(panels))
        grid = figure.subplots(len(panels), columns, sharex=True, sharey=True, squeeze=False)
        for row, (measure, layers) in enumerate(panels.items()):
            line = grid[row]
            for axes, (title, values) in zip(line, layers.items(), strict=False):
                points = _pairs(axes, values, heads, thresholds.get(measure, ()), size=5)
                if row == 0:
                    axes.set_title(title, pad=3)
            line[0].set_ylabel(measure)
        figure.supxlabel(x_label, fontsize=8)
        index_bar(figure, points, list(grid.flat), *colours, pad=0.01, aspect=30)
    return figure


def layer_panels(
    panels: Mapping[str, Array], thresholds: Sequence[float], x_label: str, y_label: str
) -> Figure:
    """Draw a small panel for each layer, with entropies ``[heads, pairs]`` coloured by head."""
    columns = 4 if len(panels) <= 16 else 6
    heads = max(map(len, panels.values()))
    with paper_style():
        figure = blank(0.6 + 0.85 * math.ceil(len(panels) / columns))
        x, y = x_label, y_label
        grid = panel_grid(figure, len(panels), columns, x=x, y=y, share_x=True, share_y=True)
        for axes, (title, values) in zip(grid, panels.items(), strict=True):
            points = _pairs(axes, values, heads, thresholds, size=1.5)
            axes.set_title(title, pad=2, fontsize=6.5)
            axes.tick_params(labelsize=6)
        index_bar(figure, points, grid, "head", pad=0.01, aspect=30)
    return figure


def entropy_axis(axes: Axes, thresholds: Sequence[float]) -> None:
    """Draw thresholds on an axis from 0 to 1."""
    for height in thresholds:
        axes.axhline(height, color=GREY, linewidth=0.7, linestyle="--", zorder=0)
    axes.set_ylim(0, 1.02)


def group_clouds(rows: Mapping[str, Sequence[GroupCloud]]) -> Figure:
    """Draw a row of panels for each name; the panels of a row share one plane and one scale."""
    with paper_style():
        columns = max(map(len, rows.values()))
        figure = blank(0.45 + 1.85 * len(rows), width=WIDTH * min(1.0, columns / 4))
        grid = figure.subplots(len(rows), columns, squeeze=False)
        handles: dict[str, Line2D] = {}
        for line, (name, panels) in zip(grid, rows.items(), strict=True):
            points = np.concatenate([p for panel in panels for p in panel.groups.values()])
            middle = (points.max(axis=0) + points.min(axis=0)) / 2
            half = 0.55 * np.ptp(points, axis=0).max()
            for axes, panel in zip(line, panels, strict=False):
                for number, (label, group) in enumerate(panel.groups.items()):
                    colour = KEYS if number == 0 else QUERIES[(number - 1) % len(QUERIES)]
                    axes.scatter(*group.T, s=3, c=colour, linewidths=0, alpha=0.5, rasterized=True)
                    handles.setdefault(label, _dot(label, colour, "o"))
                axes.plot(*panel.origin, "+", color="black", markersize=7, markeredgewidth=1)
                axes.set_title(panel.title, pad=3, fontsize=7)
                axes.set_xlim(middle[0] - half, middle[0] + half)
                axes.set_ylim(middle[1] - half, middle[1] + half)
                axes.set_box_aspect(1)
                axes.tick_params(labelleft=False, labelbottom=False, length=0)
                axes.grid(visible=False)
                axes.spines[:].set(visible=True, color="#bbbbbb")
            line[0].set_ylabel(name)
            for axes in line[len(panels) :]:
                axes.remove()
        handles["origin"] = _dot("origin", "black", "+")
        figure.legend(
            handles=list(handles.values()),
            loc="outside upper center",
            ncols=max(2, round(1.5 * columns)),  # as many as the width of the panels holds
            frameon=False,
            handletextpad=0.2,
        )
    return figure


def histogram(values: Mapping[str, Array], x_label: str, *, low: float, high: float) -> Figure:
    """Draw the shares of each group's values in 20 bins from ``low`` to ``high``."""
    edges = np.linspace(low, high, 21).tolist()
    with paper_style():
        figure = blank(2.3, width=0.62 * WIDTH)
        axes = figure.add_subplot()
        look: dict[str, Any] = {"alpha": 0.45, "histtype": "stepfilled", "linewidth": 1}
        for (label, group), colour in zip(values.items(), (KEYS, QUERIES[0]), strict=False):
            weights = np.full(group.size, 100 / group.size)
            axes.hist(group.ravel(), edges, weights=weights, color=colour, label=label, **look)
            axes.axvline(float(group.mean()), color=colour, linewidth=1.2, linestyle="--")
        axes.set_xlabel(x_label)
        axes.set_ylabel("heads (%)")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _pairs(
    axes: Axes, values: Array, heads: int, thresholds: Sequence[float], *, size: float
) -> PathCollection:
    """Draw ``[heads, pairs]`` over the pairs."""
    head, pair = np.indices(values.shape)
    points = graded_points(
        axes, pair.ravel(), values.ravel(), head.ravel(), heads, size=size, rasterized=True
    )
    entropy_axis(axes, thresholds)
    return points


def _dot(label: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], label=label, color=colour, marker=marker, linestyle="", markersize=5)
