"""Line charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

OVERLAY = 8
WIDTH = 6.75  # inches, the text width of a two-column paper

# Okabe and Ito's colours for all kinds of colour vision, without the yellow that fades on white.
_COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
_MARKERS = "osD^vPX<>*"
# Perceptually uniform, for all kinds of colour vision; without the yellow that fades on white.
GRADED = ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
_REFERENCE = "#707070"
_REFERENCE_DASHES: tuple[Literal[":", "-."], ...] = (":", "-.")

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, hence the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "svg.fonttype": "path",  # looks the same without the font
    "svg.hashsalt": "unrope",  # otherwise the identifiers in the file are random
}


@dataclass(frozen=True)
class Series:
    """A line: ``y`` over ``x`` with NaN where nothing was measured, optionally the 95% interval
    (``low`` to ``high``) and the unsmoothed values (``raw``), each as long as ``x``. ``style``
    numbers its look (:mod:`trainer.plotting.style`); ``opacity``: 1 or less."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    raw: Sequence[float] | None = None
    marked: bool = True
    opacity: float = 1.0


@dataclass(frozen=True)
class Frame:
    """What surrounds the lines: axis labels, up to two horizontal reference lines named in the
    legend, and ``prepare``, which sets scale, ticks and limits of every panel."""

    x_label: str
    y_label: str
    prepare: Callable[[Axes], None]
    vertical: tuple[float, str] | None = None  # where, and what is written above it
    horizontal: tuple[tuple[float, str], ...] = ()


def training_length_mark(length: int | None, drawn: Collection[int]) -> tuple[float, str] | None:
    """A frame's vertical line at the training length, if that lies within what is drawn."""
    if length is None or not min(drawn) <= length <= max(drawn):
        return None
    return float(length), "training length"


def paper_style() -> AbstractContextManager[None]:
    """A context in which figures are drawn; global settings are as before when it ends."""
    return mpl.rc_context(_RC)


def whole_ticks(locator: Locator) -> None:
    """Place ticks at whole numbers only."""
    assert isinstance(locator, MaxNLocator)  # as all linear axes have
    locator.set_params(integer=True)


def blank(height: float, width: float = WIDTH) -> Figure:
    """A figure in inches whose parts make room for each other, without a window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(series: Sequence[Series], frame: Frame) -> Figure:
    """One panel, or small multiples when there are more than ``OVERLAY`` series."""
    many = len(series) > OVERLAY
    columns = min((4, 3), key=lambda count: -len(series) % count)  # the fuller last row
    rows = math.ceil(len(series) / columns)
    figure = blank(0.75 + 1.22 * rows if many else 3.1)
    if many:
        _small_multiples(figure, series, frame, (rows, columns))
    else:
        _overlay(figure, series, frame)
    return figure


def _overlay(figure: Figure, series: Sequence[Series], frame: Frame) -> None:
    axes = figure.add_subplot()
    for item in series:
        draw_line(axes, item)
    finish(axes, frame, with_note=True)
    axes.set_xlabel(frame.x_label)
    axes.set_ylabel(frame.y_label)
    # In the order of the right ends of the lines, as the eye meets them.
    ranked = sorted(series, key=_last_value, reverse=True)
    handles = [line_handle(item) for item in ranked]
    figure.legend(
        handles=[*handles, *reference_handles(frame)],
        loc="outside right center",
        frameon=False,
        handlelength=2.6,
    )


def _small_multiples(
    figure: Figure, series: Sequence[Series], frame: Frame, shape: tuple[int, int]
) -> None:
    grid = figure.subplots(*shape, sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes, item in zip(panels, series, strict=False):
        for other in series:
            axes.plot(other.x, other.y, color="#d0d0d0", linewidth=0.6, zorder=1)
        draw_line(axes, item)
        finish(axes, frame, with_note=False)
        axes.set_title(item.label, color=line_style(item)["color"], pad=3, fontsize=7.5)
    trim(panels, len(series), shape[1])
    figure.supxlabel(frame.x_label, fontsize=8)
    figure.supylabel(frame.y_label, fontsize=8)
    legend_above(figure, reference_handles(frame, with_vertical=True))


def trim(grid: Sequence[Axes], used: int, columns: int) -> None:
    """Remove panels without a line; those above a gap get the tick labels of their column."""
    for axes in grid[used:]:
        axes.remove()
    for axes in grid[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)


def log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis, with ticks for values from ``low`` to ``high``."""
    axes.set_yscale("log")
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1,) if decades > 3 else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def draw_line(axes: Axes, item: Series) -> None:
    """One line with its interval and its unsmoothed values, where it has them."""
    style = line_style(item)
    if item.raw is not None:
        axes.plot(item.x, item.raw, color=style["color"], alpha=0.3, linewidth=0.6, zorder=2)
    if item.low is not None and item.high is not None:
        below = [y - low for y, low in zip(item.y, item.low, strict=True)]
        above = [high - y for y, high in zip(item.y, item.high, strict=True)]
        axes.errorbar(
            item.x,
            item.y,
            yerr=[below, above],
            fmt="none",
            ecolor=style["color"],
            elinewidth=0.8,
            capsize=1.5,
            capthick=0.8,
            zorder=2,
        )
    axes.plot(item.x, item.y, zorder=3, **style)


def finish(axes: Axes, frame: Frame, with_note: bool) -> None:
    """Scale, limits, reference lines and the note of one panel."""
    frame.prepare(axes)
    for (height, _), dash in zip(frame.horizontal, _REFERENCE_DASHES, strict=False):
        axes.axhline(height, color=_REFERENCE, linewidth=0.8, linestyle=dash, zorder=1)
    if frame.vertical is None:
        return
    x, note = frame.vertical
    axes.axvline(x, color=_REFERENCE, linewidth=0.8, linestyle="--", zorder=1)
    if with_note:
        # Above the axes, where it covers no data; it grows towards the wider side.
        fraction = axes.transLimits.transform(axes.transScale.transform((x, 1)))[0]
        align = "left" if fraction < 0.33 else "right" if fraction > 0.67 else "center"
        axes.annotate(
            note,
            (x, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha=align,
            va="bottom",
            color=_REFERENCE,
            fontsize=7.5,
        )


def reference_handles(frame: Frame, with_vertical: bool = False) -> list[Line2D]:
    """The reference lines as entries of a legend."""
    style: dict[str, Any] = {"color": _REFERENCE, "linewidth": 0.8}
    handles = [
        Line2D([], [], linestyle=dash, label=text, **style)
        for (_, text), dash in zip(frame.horizontal, _REFERENCE_DASHES, strict=False)
    ]
    if with_vertical and frame.vertical is not None:
        handles.append(
            Line2D([], [], linestyle="--", label=frame.vertical[1].replace("\n", ": "), **style)
        )
    return handles


def line_handle(item: Series) -> Line2D:
    """The line as an entry of a legend."""
    return Line2D([], [], label=item.label, **line_style(item))


def legend_above(figure: Figure, handles: Sequence[Line2D], columns: int = 4) -> None:
    """One legend for all panels, over them, in at most so many columns as the figure is wide."""
    for count in range(min(columns, len(handles)), 0, -1):
        legend = figure.legend(
            handles=list(handles),
            loc="outside upper center",
            ncols=count,
            frameon=False,
            handlelength=2.6,
        )
        if count == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def line_style(item: Series) -> dict[str, Any]:
    """Colour, dashes and marker of a line, the same wherever it is drawn."""
    colour = _COLOURS[item.style % len(_COLOURS)]
    look = {"color": colour, "linestyle": _DASHES[item.style // len(_COLOURS) % len(_DASHES)]}
    if item.opacity < 1:
        look["alpha"] = item.opacity
    if item.marked:
        look["marker"] = _MARKERS[item.style % len(_MARKERS)]
    return look


def _last_value(item: Series) -> float:
    return next((y for y in reversed(item.y) if math.isfinite(y)), -math.inf)
