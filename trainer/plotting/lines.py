"""Line charts with intervals: one panel, and panels beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from trainer.plotting.style import COLOURS, GRADED, GREY, blank, paper_style, whole_ticks

Array = np.ndarray
MOST_LINES = 8
"""Most lines of one panel."""
LOW, HIGH = 0.1, 0.9
"""Quantiles of heads that a band spans."""

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
_MARKERS = "osD^vPX<>*"
_REFERENCE_DASHES: tuple[Literal[":", "-."], ...] = (":", "-.")
_LINEAR = 5  # values that span less than this factor stay on a linear axis


@dataclass(frozen=True)
class Series:
    """A line ``y`` over ``x``, with NaN where nothing was measured.

    ``style``: its style number (:func:`~trainer.plotting.style.style_numbers`). ``low``, ``high``:
    its interval at every x. ``raw``: unsmoothed values, drawn thin. ``opacity``: 1 or less.
    """

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    raw: Sequence[float] | None = None
    marked: bool = True
    opacity: float = 1.0


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


def training_length_mark(length: int | None, drawn: Collection[int]) -> tuple[float, str] | None:
    """Return a vertical line at the training length, or None if it is outside of ``drawn``."""
    if length is None or not min(drawn) <= length <= max(drawn):
        return None
    return float(length), "training length"


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


def padded(low: float, high: float, least_span: float) -> tuple[float, float]:
    """Return limits of a linear axis around values.

    ``least_span``: smallest distance of the limits; a narrower axis makes a trend of noise.
    """
    room = max(0.06 * (high - low), (least_span - (high - low)) / 2)
    return low - room, high + room


def whole_x(prepare: Callable[[Axes], None] = unscaled) -> Callable[[Axes], None]:
    """Return ``prepare`` followed by ticks at whole numbers of x."""

    def prepare_both(axes: Axes) -> None:
        prepare(axes)
        whole_ticks(axes.xaxis.get_major_locator())

    return prepare_both


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
    low, high = np.nanquantile(rows, [LOW, HIGH], axis=0).tolist()
    mean = (np.nanmedian if median else np.nanmean)(rows, axis=0).tolist()
    return Series(label, style, x, mean, low, high, marked=marked)


def draw(series: Sequence[Series], frame: Frame) -> Figure:
    """Draw one panel."""
    return side_by_side([Panel("", series, frame)], height=2.8)


def side_by_side(
    panels: Sequence[Panel],
    *,
    columns: int | None = None,
    height: float = 2.5,
    x_label: str = "",
    y_label: str = "",
    bands: bool = False,
) -> Figure:
    """Draw panels beside each other with one legend; a label has one style in all of them.

    ``columns``: panels in a row (None: all); ``height``: inches of a row. ``x_label``, ``y_label``:
    one label for all panels, instead of their own. ``bands``: shade intervals instead of drawing
    bars.
    """
    columns = min(columns or len(panels), len(panels))
    with paper_style():
        figure = blank(height * math.ceil(len(panels) / columns) + 0.3)
        grid = panel_grid(figure, len(panels), columns, x=x_label, y=y_label)
        handles: dict[str, Line2D] = {}
        references: dict[str, Line2D] = {}
        for axes, panel in zip(grid, panels, strict=True):
            _draw_panel(axes, panel, bands=bands)
            axes.set_title(panel.title, pad=4)
            if not y_label:
                axes.set_ylabel(panel.frame.y_label)
            if not x_label:
                axes.set_xlabel(panel.frame.x_label)
            for series in (line for line in panel.series if line.label):
                handle = Line2D([], [], label=series.label, **line_style(series))
                handles.setdefault(series.label, handle)
            for handle in reference_handles(panel.frame):
                references.setdefault(str(handle.get_label()), handle)
        legend_above(figure, [*handles.values(), *references.values()])
    return figure


def by_length(
    panels: Sequence[Panel], *, x_label: str, trained: int, columns: int = 3, height: float = 2.25
) -> Figure:
    """Draw panels over a logarithmic axis of tokens, with bands and the training length."""
    mark = (float(trained), f"training length ({trained:,} tokens)")

    def over_lengths(frame: Frame) -> Frame:
        def prepare(axes: Axes) -> None:
            frame.prepare(axes)
            log_lengths(axes)

        return replace(frame, prepare=prepare, vertical=mark)

    framed = [replace(panel, frame=over_lengths(panel.frame)) for panel in panels]
    return side_by_side(framed, columns=columns, height=height, x_label=x_label, bands=True)


def panel_grid(
    figure: Figure,
    count: int,
    columns: int,
    *,
    x: str = "",
    y: str = "",
    share_x: bool = False,
    share_y: bool = False,
) -> list[Axes]:
    """Return ``count`` panels in rows of ``columns``.

    ``x``, ``y``: labels of the whole figure. Panels that share x have tick labels in the last row
    and above its gaps.
    """
    rows = math.ceil(count / columns)
    grid = figure.subplots(rows, columns, sharex=share_x, sharey=share_y, squeeze=False)
    panels, unused = list(grid.flat)[:count], list(grid.flat)[count:]
    for axes in unused:
        axes.remove()
    for axes in panels[-columns:] if share_x else ():
        axes.tick_params(labelbottom=True)
    if x:
        figure.supxlabel(x, fontsize=8)
    if y:
        figure.supylabel(y, fontsize=8)
    return panels


def draw_line(axes: Axes, item: Series, *, band: bool = False) -> None:
    """Draw a line, its unsmoothed values, and its interval as bars or as a band."""
    style = line_style(item)
    if item.raw is not None:
        axes.plot(item.x, item.raw, color=style["color"], alpha=0.3, linewidth=0.6, zorder=2)
    if item.low is not None and item.high is not None and band:
        look = {"color": style["color"], "alpha": 0.15, "linewidth": 0, "zorder": 1.5}
        axes.fill_between(item.x, item.low, item.high, **look)
    elif item.low is not None and item.high is not None:
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


def reference_handles(frame: Frame) -> list[Line2D]:
    """Return legend entries for the reference lines."""
    style: dict[str, Any] = {"color": GREY, "linewidth": 0.8}
    handles = [
        Line2D([], [], linestyle=dash, label=text, **style)
        for (_, text), dash in zip(frame.horizontal, _REFERENCE_DASHES, strict=False)
    ]
    if frame.vertical is not None:
        text = frame.vertical[1].replace("\n", ": ")
        handles.append(Line2D([], [], linestyle="--", label=text, **style))
    return handles


def line_style(item: Series) -> dict[str, Any]:
    """Return colour, dashes and marker of a line, which depend on its style number."""
    colour = COLOURS[item.style % len(COLOURS)]
    look = {"color": colour, "linestyle": _DASHES[item.style // len(COLOURS) % len(_DASHES)]}
    if item.opacity < 1:
        look["alpha"] = item.opacity
    if item.marked:
        look["marker"] = _MARKERS[item.style % len(_MARKERS)]
    return look


def legend_above(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Draw one legend above all panels, in at most four columns that fit the width."""
    for count in range(min(4, len(handles)), 0, -1):
        legend = figure.legend(
            handles=list(handles),
            loc="outside upper center",
            ncols=count,
            frameon=False,
            handlelength=2.6,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # a dollar sign in a name must not start a formula
        if count == 1 or legend.get_window_extent().width <= 0.97 * figure.bbox.width:
            return
        legend.remove()


def _draw_panel(axes: Axes, panel: Panel, *, bands: bool = False) -> None:
    """Draw the lines and reference lines of a panel, without labels and title."""
    if panel.faint is not None:
        # One collection: a line each would make the SVG large.
        x = np.broadcast_to(np.asarray(panel.series[0].x, float), panel.faint.shape)
        lines = list(np.stack([x, panel.faint], axis=-1))
        drawn = LineCollection(lines, linewidths=0.5, alpha=0.5, zorder=1, rasterized=True)
        drawn.set(array=np.arange(len(lines)), cmap=GRADED)
        axes.add_collection(drawn)
    for series in panel.series:
        draw_line(axes, series, band=bands)
    frame = panel.frame
    frame.prepare(axes)
    for (height, _), dash in zip(frame.horizontal, _REFERENCE_DASHES, strict=False):
        axes.axhline(height, color=GREY, linewidth=0.8, linestyle=dash, zorder=1)
    if frame.vertical is not None:
        axes.axvline(frame.vertical[0], color=GREY, linewidth=0.8, linestyle="--", zorder=1)


def _tokens(value: float, _: int) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
