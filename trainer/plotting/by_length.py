"""DRAWDOC"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from trainer.plotting.lines import (
    WIDTH,
    Frame,
    Series,
    blank,
    draw_line,
    finish,
    legend_above,
    line_handle,
    line_style,
    paper_style,
    reference_handles,
)

Array = np.ndarray
LOW, HIGH = 0.1, 0.9
"""Quantiles of heads that a band reaches from and to."""
KEYS, QUERIES = "#D55E00", ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_FAINT = "#9a9a9a"


@dataclass(frozen=True)
class Panel:
    """``lines``: what lies between ``low`` and ``high`` of one is shaded. ``faint``: ``[n, x]``,
    thin lines over the x of the first line. ``prepare``: sets scales and limits of y."""

    title: str
    y_label: str
    lines: Sequence[Series]
    faint: Array | None = None
    prepare: Callable[[Axes], None] | None = None


@dataclass(frozen=True)
class Cloud:
    """Points ``[n, 2]`` by the name of their group, in the colours of :data:`KEYS` and
    :data:`QUERIES`, and where the ``origin`` lies."""

    title: str
    groups: Mapping[str, Array]
    origin: Array


def over_heads(
    label: str,
    style: int,
    x: Sequence[float],
    values: Array,
    *,
    marked: bool = True,
    median: bool = False,
) -> Series:
    """The mean (or median) of ``values`` ``[layers, heads, x]``, and where 80% of heads are.

    NaN is no head.
    """
    rows = values.reshape(-1, values.shape[-1])
    low, high = np.nanquantile(rows, [LOW, HIGH], axis=0)
    mean = (np.nanmedian if median else np.nanmean)(rows, axis=0)
    return Series(
        label, style, x, mean.tolist(), low=low.tolist(), high=high.tolist(), marked=marked
    )


def by_length(
    panels: Sequence[Panel], *, x_label: str, trained: int, columns: int = 3, height: float = 2.25
) -> Figure:
    """Panels beside each other, with one legend and the training length marked.

    x is in tokens from 1 on, logarithmic.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    note = (float(trained), f"training length ({trained:,} tokens)")

    def prepare_x(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(2, numticks=7))
        axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
        axes.xaxis.set_minor_locator(NullLocator())

    with paper_style():
        figure = blank(height * rows + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False)
        shown: dict[str, Line2D] = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            if panel.faint is not None:
                axes.add_collection(_thin(panel.lines[0].x, panel.faint))
            for series in panel.lines:
                style = line_style(series)
                if series.low is not None and series.high is not None:
                    axes.fill_between(series.x, series.low, series.high, color=style["color"],
                                      alpha=0.15, linewidth=0, zorder=1.5)  # fmt: skip
                draw_line(axes, replace(series, low=None, high=None))
                shown.setdefault(series.label, line_handle(series))
            if panel.prepare is not None:
                panel.prepare(axes)
            finish(axes, Frame("", "", prepare_x, note), with_note=False)
            axes.set_title(panel.title, pad=4)
            axes.set_ylabel(panel.y_label)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        figure.supxlabel(x_label, fontsize=8)
        shown[note[1]] = reference_handles(Frame("", "", prepare_x, note), with_vertical=True)[0]
        legend_above(figure, list(shown.values()))
    return figure


def histogram(values: Mapping[str, Array], x_label: str, *, low: float, high: float) -> Figure:
    """Share of the values of every group by size, 20 bins from ``low`` to ``high``."""
    edges = np.linspace(low, high, 21).tolist()
    with paper_style():
        figure = blank(2.3, width=0.62 * WIDTH)
        axes = figure.add_subplot()
        for (label, group), colour in zip(values.items(), (KEYS, QUERIES[0]), strict=False):
            weights = np.full(group.size, 100 / group.size)
            axes.hist(group.ravel(), edges, weights=weights, color=colour, alpha=0.45,
                      label=label, histtype="stepfilled", linewidth=1)  # fmt: skip
            axes.axvline(float(group.mean()), color=colour, linewidth=1.2, linestyle="--")
        axes.set_xlabel(x_label)
        axes.set_ylabel("heads (%)")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def clouds(rows: Mapping[str, Sequence[Cloud]]) -> Figure:
    """``rows``: by name, panels of one plane, drawn at one scale."""
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
                for number, (label, of) in enumerate(panel.groups.items()):
                    colour = KEYS if number == 0 else QUERIES[(number - 1) % len(QUERIES)]
                    axes.scatter(*of.T, s=3, c=colour, linewidths=0, alpha=0.5, rasterized=True)
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


def _thin(x: Sequence[float], rows: Array) -> LineCollection:
    """One picture of all lines, not one of each."""
    lines = np.stack([np.broadcast_to(np.asarray(x, float), rows.shape), rows], axis=-1)
    return LineCollection(
        list(lines), colors=_FAINT, linewidths=0.3, alpha=0.5, zorder=1, rasterized=True
    )


def _dot(label: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], label=label, color=colour, marker=marker, linestyle="", markersize=5)


def _tokens(value: float, _: int) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
