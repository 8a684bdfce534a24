"""Line charts with intervals, in panels beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from trainer.plotting.style import COLOURS, GRADED, GREY, blank, paper_style

Array = np.ndarray
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
_MARKERS = "osD^vPX<>*"
_REFERENCE_DASHES: tuple[Literal[":", "-."], ...] = (":", "-.")
_LINEAR = 5  # values that span less than this factor stay on a linear axis


@dataclass(frozen=True)
class Series:
    """A line ``y`` over ``x``, with NaN where nothing was measured.

    ``style``: its style number (:func:`~trainer.plotting.style.style_numbers`). ``low``, ``high``:
    its interval at every x. ``raw``: unsmoothed values, drawn thin. ``marked``: with markers.
    """

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    raw: Sequence[float] | None = None
    marked: bool = True


def unscaled(axes: Axes) -> None:
    """Leave the axes as matplotlib scales them."""


@dataclass(frozen=True)
class Frame:
    """Labels and reference lines of a panel.

    ``prepare`` sets scales, ticks and limits. ``vertical``: one line, as x and name.
    ``horizontal``: up to two lines, as y and name.
    """

    x_label: str
    y_label: str
    prepare: Callable[[Axes], None] = unscaled
    vertical: tuple[float, str] | None = None
    horizontal: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Panel:
    """Lines in a frame under a title.

    ``faint`` ``[n, x]``: thin lines over the first line's x, from dark to light.
    """

    title: str
    series: Sequence[Series]
    frame: Frame
    faint: Array | None = None


def log_axis(axes: Axes, low: float, high: float) -> None:
    """Make the y axis logarithmic, with ticks for values from ``low`` to ``high``."""
    axes.set_yscale("log")
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1,) if decades > 3 else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def log_if_wide(axes: Axes) -> None:
    """Make the y axis logarithmic if its values are positive and span a large factor."""
    low, high = axes.dataLim.intervaly
    if 0 < _LINEAR * low < high:
        log_axis(axes, low, high)


def log_lengths(axes: Axes) -> None:
    """Make the x axis logarithmic in tokens, with ticks at powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.xaxis.set_minor_locator(NullLocator())


def over_heads(
    label: str,
    style: int,
    x: Sequence[float],
    values: Array,
    *,
    marked: bool = True,
    median: bool = False,
) -> Series:
    """Return the mean (or median) over heads of ``values`` ``[layers, heads, x]``.

    The interval holds 80% of the heads. NaN stands for a head that a layer does not have.
    """
    rows = values.reshape(-1, values.shape[-1])
    low, high = np.nanquantile(rows, [0.1, 0.9], axis=0).tolist()
    mean = (np.nanmedian if median else np.nanmean)(rows, axis=0).tolist()
    return Series(label, style, x, mean, low, high, marked=marked)


def side_by_side(
    panels: Sequence[Panel],
    *,
    columns: int | None = None,
    height: float = 2.5,
    x_label: str = "",
    trained: int | None = None,
) -> Figure:
    """Draw panels beside each other with one legend; a label has one style in all of them.

    ``columns``: panels in a row (None: all); ``height``: inches of a row. ``x_label``: one label
    for all panels, instead of their own. ``trained``: see :func:`by_length`.
    """
    columns = min(columns or len(panels), len(panels))
    with paper_style():
        figure = blank(height * math.ceil(len(panels) / columns) + 0.3)
        grid = panel_grid(figure, len(panels), columns, x=x_label)
        for axes, panel in zip(grid, panels, strict=True):
            _draw(axes, panel, bands=trained is not None)
            if trained is not None:
                log_lengths(axes)
                _vertical(axes, trained, f"training length ({trained:,} tokens)")
            axes.set_title(panel.title, pad=4)
            axes.set_ylabel(panel.frame.y_label)
            if not x_label:
                axes.set_xlabel(panel.frame.x_label)
        legend_above(figure)
    return figure


def by_length(
    panels: Sequence[Panel], *, x_label: str, trained: int, columns: int = 3, height: float = 2.25
) -> Figure:
    """Draw panels over a logarithmic axis of tokens, with bands instead of bars, and the training
    length."""
    return side_by_side(panels, columns=columns, height=height, x_label=x_label, trained=trained)


def panel_grid(
    figure: Figure, count: int, columns: int, *, x: str = "", y: str = "", share: bool = False
) -> list[Axes]:
    """Return ``count`` panels in rows of ``columns``.

    ``x``, ``y``: labels of the whole figure. ``share``: all panels have the same axes, with tick
    labels of x in the last row and above its gaps.
    """
    rows = math.ceil(count / columns)
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
    panels, unused = list(grid.flat)[:count], list(grid.flat)[count:]
    for axes in unused:
        axes.remove()
    for axes in panels[-columns:] if share else ():
        axes.tick_params(labelbottom=True)
    if x:
        figure.supxlabel(x, fontsize=8)
    if y:
        figure.supylabel(y, fontsize=8)
    return panels


def legend_above(figure: Figure) -> None:
    """Draw one legend of all panels above them, in at most four columns that fit the width, lines
    before references."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = sorted(handles.values(), key=lambda handle: -handle.get_zorder())
    for count in range(min(4, len(shown)), 0, -1):
        legend = figure.legend(
            handles=shown, loc="outside upper center", ncols=count, frameon=False, handlelength=2.6
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # a dollar sign in a name must not start a formula
        if count == 1 or legend.get_window_extent().width <= 0.97 * figure.bbox.width:
            return
        legend.remove()


def _draw(axes: Axes, panel: Panel, *, bands: bool) -> None:
    """Draw the lines and reference lines of a panel."""
    if panel.faint is not None:
        # One collection: a line each would make the SVG large.
        x = np.broadcast_to(np.asarray(panel.series[0].x, float), panel.faint.shape)
        lines = list(np.stack([x, panel.faint], axis=-1))
        drawn = LineCollection(lines, linewidths=0.5, alpha=0.5, zorder=1, rasterized=True)
        drawn.set(array=np.arange(len(lines)), cmap=GRADED)
        axes.add_collection(drawn)
    for item in panel.series:
        _draw_line(axes, item, bands=bands)
    frame = panel.frame
    frame.prepare(axes)
    for (height, name), dash in zip(frame.horizontal, _REFERENCE_DASHES, strict=False):
        axes.axhline(height, color=GREY, linewidth=0.8, linestyle=dash, zorder=1, label=name)
    if frame.vertical is not None:
        _vertical(axes, *frame.vertical)


def _draw_line(axes: Axes, item: Series, *, bands: bool) -> None:
    """Draw a line, its unsmoothed values, and its interval as bars or as a band."""
    colour = COLOURS[item.style % len(COLOURS)]
    if item.raw is not None:
        axes.plot(item.x, item.raw, color=colour, alpha=0.3, linewidth=0.6, zorder=2)
    if item.low is not None and item.high is not None:
        low, high = np.asarray(item.low), np.asarray(item.high)
        if bands:
            axes.fill_between(item.x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1.5)
        else:
            axes.errorbar(
                item.x,
                item.y,
                yerr=[item.y - low, high - item.y],
                fmt="none",
                ecolor=colour,
                elinewidth=0.8,
                capsize=1.5,
                capthick=0.8,
                zorder=2,
            )
    axes.plot(
        item.x,
        item.y,
        color=colour,
        linestyle=_DASHES[item.style // len(COLOURS) % len(_DASHES)],
        marker=_MARKERS[item.style % len(_MARKERS)] if item.marked else None,
        label=item.label,
        zorder=3,
    )


def _vertical(axes: Axes, x: float, name: str) -> None:
    axes.axvline(x, color=GREY, linewidth=0.8, linestyle="--", zorder=1, label=name)


def _tokens(value: float, _: int) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
