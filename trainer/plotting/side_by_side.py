"""DRAWDOC"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trainer.plotting.lines import (
    GRADED,
    WIDTH,
    Frame,
    Series,
    blank,
    draw_line,
    finish,
    legend_above,
    line_handle,
    log_axis,
    paper_style,
    reference_handles,
    whole_ticks,
)

Array = np.ndarray
HEIGHT = 2.5
_LINEAR = 5  # values that span less than this factor stay on a linear axis


@dataclass(frozen=True)
class Panel:
    """``series`` in ``frame``, under a title; a label has one style in all panels of a figure."""

    title: str
    series: Sequence[Series]
    frame: Frame


@dataclass(frozen=True)
class Cloud:
    """Points ``x``, ``y`` ``[layers, heads]`` under a title; ``diagonal``: with the line x = y."""

    title: str
    x: Array
    y: Array
    x_label: str
    y_label: str
    diagonal: bool = False


@dataclass(frozen=True)
class HeadCloud:
    """Points ``x``, ``y`` ``[n]`` of heads with their ``layer``; else as :class:`Cloud`."""

    title: str
    layer: Array
    x: Array
    y: Array
    x_label: str
    y_label: str
    diagonal: bool = False


def unscaled(axes: Axes) -> None:
    """Axes as they come."""


def logarithmic(axes: Axes) -> None:
    """A logarithmic axis where the values span much."""
    low, high = axes.dataLim.intervaly
    if 0 < _LINEAR * low < high:
        log_axis(axes, low, high)


def whole_numbers(then: Callable[[Axes], None] = unscaled) -> Callable[[Axes], None]:
    """Ticks at whole numbers of x."""

    def prepare(axes: Axes) -> None:
        then(axes)
        whole_ticks(axes.xaxis.get_major_locator())

    return prepare


def lines(panels: Sequence[Panel]) -> Figure:
    """One panel a column."""
    with paper_style():
        figure, grid = _columns(len(panels))
        shown: dict[str, Line2D] = {}
        references: dict[str, Line2D] = {}
        for axes, panel in zip(grid, panels, strict=True):
            for series in panel.series:
                draw_line(axes, series)
                shown.setdefault(series.label, line_handle(series))
            finish(axes, panel.frame, with_note=False)
            axes.set_title(panel.title, pad=4)
            axes.set_xlabel(panel.frame.x_label)
            axes.set_ylabel(panel.frame.y_label)
            for handle in reference_handles(panel.frame, with_vertical=True):
                references.setdefault(str(handle.get_label()), handle)
        legend_above(figure, [*shown.values(), *references.values()])
    return figure


def points(clouds: Sequence[Cloud]) -> Figure:
    """One panel a column, a point for every head, coloured by its layer."""
    layers = len(clouds[0].x)
    layer = np.repeat(np.arange(layers), clouds[0].x.shape[1])
    return head_points(
        [
            HeadCloud(c.title, layer, c.x.ravel(), c.y.ravel(), c.x_label, c.y_label, c.diagonal)
            for c in clouds
        ],
        layers,
    )


def head_points(clouds: Sequence[HeadCloud], layers: int) -> Figure:
    """As :func:`points`, of some heads of a model of so many ``layers``."""
    with paper_style():
        figure, grid = _columns(len(clouds), narrow=len(clouds) == 1)
        for axes, cloud in zip(grid, clouds, strict=True):
            if cloud.diagonal:
                both = np.concatenate([cloud.x, cloud.y])
                ends = [both.min(), both.max()]
                axes.plot(ends, ends, color="#707070", linewidth=0.8, linestyle=":", zorder=1)
            found = axes.scatter(
                cloud.x,
                cloud.y,
                c=cloud.layer,
                cmap=GRADED,
                vmin=0,
                vmax=max(layers - 1, 1),
                s=16,
                linewidths=0,
                alpha=0.85,
            )
            axes.grid(visible=True, axis="both")
            axes.locator_params(axis="x", nbins=5)
            axes.set_title(cloud.title, pad=4)
            axes.set_xlabel(cloud.x_label)
            axes.set_ylabel(cloud.y_label)
        bar = figure.colorbar(found, ax=list(grid), label="layer", pad=0.02, aspect=25)
        whole_ticks(bar.locator)
        assert bar.solids is not None
        bar.solids.set_alpha(1)
    return figure


def _columns(count: int, narrow: bool = False) -> tuple[Figure, list[Axes]]:
    figure = blank(HEIGHT + 0.3, WIDTH * (0.6 if narrow else 1))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
