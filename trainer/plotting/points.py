"""Scatter plots, coloured by group or by a number, and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from trainer.plotting.lines import Frame, legend_above, panel_grid
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
GROUPS = (ORANGE, BLUE, SKY, GREEN, PINK)
"""Colours of groups, in their order; keys come first and queries after them."""
BARE = Frame("", "")


@dataclass(frozen=True)
class Points:
    """Points of one panel, ``[n, 2]`` by the name of their group, empty for no entry in a legend.

    ``index`` ``[n]``: number of every point of the only group, shown as its colour.
    """

    title: str
    groups: Mapping[str, Array]
    frame: Frame = BARE
    index: Array | None = None

    @classmethod
    def graded(cls, title: str, x: Array, y: Array, index: Array, frame: Frame = BARE) -> Points:
        """Return points with a colour by ``index``, from arrays of one shape."""
        x, y, index = np.broadcast_arrays(x, y, index)
        return cls(title, {"": np.column_stack([x.ravel(), y.ravel()])}, frame, index.ravel())


def points(
    panels: Sequence[Points],
    *,
    columns: int | None = None,
    height: float = 2.7,
    size: float = 5.0,
    index: str = "",
    x: str = "",
    y: str = "",
    share: bool = False,
) -> Figure:
    """Draw panels in rows of ``columns`` (None: all), with one legend or one colour bar.

    ``height``: inches of a row. ``size``: area of a point. ``index``: label of the colour bar.
    ``x``, ``y``: labels of the whole figure. ``share``: all panels have the same axes.
    """
    columns = min(columns or len(panels), len(panels))
    small = columns > 3
    numbers = [panel.index for panel in panels if panel.index is not None]
    top = max((float(np.nanmax(n)) for n in numbers if n.size), default=1.0)
    look: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True}
    with paper_style():
        width = WIDTH * (0.6 if len(panels) == 1 else 1)
        figure = blank(0.4 + height * math.ceil(len(panels) / columns), width)
        grid = panel_grid(figure, len(panels), columns, x=x, y=y, share=share)
        for axes, panel in zip(grid, panels, strict=True):
            for (name, group), colour in zip(panel.groups.items(), GROUPS, strict=False):
                if panel.index is None:
                    axes.scatter(*group.T, color=colour, alpha=0.5, **look)
                    axes.plot([], [], "o", color=colour, markersize=4, label=name)
                else:
                    norm = Normalize(0, max(top, 1e-9))
                    graded: dict[str, Any] = {
                        "c": panel.index,
                        "cmap": GRADED,
                        "norm": norm,
                        "alpha": 0.85,
                    }
                    drawn = axes.scatter(group[:, 0], group[:, 1], **look, **graded)
            panel.frame.prepare(axes)
            for level, _ in panel.frame.horizontal:
                axes.axhline(level, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
            axes.set_title(panel.title, pad=3, fontsize=6.5 if small else 8)
            axes.set_xlabel(panel.frame.x_label)
            axes.set_ylabel(panel.frame.y_label)
            axes.tick_params(labelsize=6 if small else 7)
        legend_above(figure)
        if numbers:
            bar = figure.colorbar(drawn, ax=grid, label=index, pad=0.02, aspect=30)
            if all(np.issubdtype(n.dtype, np.integer) for n in numbers):
                whole_ticks(bar.locator)
            if bar.solids is not None:
                bar.solids.set_alpha(1)
    return figure


def diagonal(axes: Axes) -> None:
    """Draw the line x = y over the range of the points."""
    low, high = min(*axes.dataLim.min), max(*axes.dataLim.max)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, linestyle=":", zorder=1)


def plane(half: float | None = None, centre: Array | None = None) -> Callable[[Axes], None]:
    """Return a function that gives both axes one scale; limits are ``centre`` ± ``half`` if
    given."""

    def prepare(axes: Axes) -> None:
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.axvline(0, color=GREY, linewidth=0.5)
        axes.grid(visible=False)
        if half is None or centre is None:
            axes.set_aspect("equal", adjustable="datalim")
            axes.locator_params(nbins=3)
            return
        axes.set(xlim=(centre[0] - half, centre[0] + half), box_aspect=1)
        axes.set_ylim(centre[1] - half, centre[1] + half)
        axes.tick_params(labelleft=False, labelbottom=False, length=0)

    return prepare


def histogram(values: Mapping[str, Array], x_label: str, *, low: float, high: float) -> Figure:
    """Draw the shares of each group's values in 20 bins from ``low`` to ``high``; dashed: means."""
    edges = np.linspace(low, high, 21).tolist()
    with paper_style():
        figure = blank(2.3, width=0.62 * WIDTH)
        axes = figure.add_subplot()
        look: dict[str, Any] = {"alpha": 0.45, "histtype": "stepfilled", "linewidth": 1}
        for (label, group), colour in zip(values.items(), GROUPS, strict=False):
            weights = np.full(group.size, 100 / group.size)
            axes.hist(group.ravel(), edges, weights=weights, color=colour, label=label, **look)
            axes.axvline(float(group.mean()), color=colour, linewidth=1.2, linestyle="--")
        axes.set_xlabel(x_label)
        axes.set_ylabel("share (%)")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
