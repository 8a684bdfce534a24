"""Figures: panels of lines and points, and heat maps; their style and their files.

Drawn over matplotlib; knows no results.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, count, cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trainer.common.files import write_atomically

WIDTHS = {"single": 3.3, "double": 6.75}
"""Widths of figures in inches: a column and the text width of a two-column paper."""

# Okabe and Ito's palette for colour-blind readers, without its yellow, which fades on white.
BLACK, BLUE, SKY, GREEN = "#000000", "#0072B2", "#56B4E9", "#009E73"
ORANGE, AMBER, PINK = "#D55E00", "#E69F00", "#CC79A7"
GREY, PALE, GRID = "#707070", "#b8b8b8", "#e4e4e4"
COLOURS = (BLACK, BLUE, SKY, GREEN, ORANGE, AMBER, PINK)
"""Colours of styles 0 to 6; later styles repeat all but black with other dashes."""
GRADED = ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
"""Perceptually uniform colours for a number, without the yellow that fades on white."""

_FIXED = (
    *("RoPE", "RoPE + PI", "RoPE + NTK-aware", "RoPE + YaRN", "DroPE", "DroPE + temperature"),
    *("NoPE", "NoPE + temperature", "HalfRoPE", "High-frequency RoPE", "RoPE-ID", "p-RoPE"),
    *("RoPE + temperature", "ALiBi", "RoPE + cropped", "HoPE"),
)
STYLE_NUMBERS = {name: number for number, name in enumerate(_FIXED)}
"""Fixed style numbers of common names, so that a method looks alike on all pages."""

SHEET = mpl.rc_params_from_file(
    Path(__file__).with_name("plotting.mplstyle"), use_default_template=False
)
"""Settings of matplotlib that all styles share."""
_CLOUD_DPI = 200  # of the bitmaps in SVGs and PDFs
_PAGE = 9.0  # height of a page in inches


@dataclass(frozen=True)
class Style:
    """Look of figures: width in inches, ``sans`` or ``serif``, and size of text in points."""

    width: float = WIDTHS["double"]
    font: str = "sans"
    size: float = 8.0

    @property
    def scale(self) -> float:
        """Size of text relative to the default."""
        return self.size / 8

    def columns(self, columns: int) -> int:
        """Return the number of panels beside each other where the default width has ``columns``."""
        return max(1, round(columns * self.width / WIDTHS["double"]))

    def settings(self) -> dict[Any, Any]:
        """Return the settings of matplotlib."""
        return {
            **SHEET,
            "font.family": {"sans": "sans-serif", "serif": "serif"}[self.font],
            "font.size": self.size,
            "xtick.labelsize": 7 * self.scale,
            "ytick.labelsize": 7 * self.scale,
            "legend.fontsize": 7.5 * self.scale,
            "grid.color": GRID,
        }


DEFAULT_STYLE = Style()
_style: ContextVar[Style] = ContextVar("style", default=DEFAULT_STYLE)


def use_style(width: str = "double", font: str = "sans", size: float = 8.0) -> None:
    """Draw and save all further figures in a style; ``width``: a key of :data:`WIDTHS`."""
    _style.set(Style(WIDTHS[width], font, size))


Array = np.ndarray
GROUPS = (ORANGE, BLUE, SKY, GREEN, PINK, AMBER, BLACK)
"""Colours of groups of points: the first group, such as keys, has the first one alone."""
_MARKED = 16  # points of a line; longer lines have no markers
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
_MARKERS = "osD^vPX<>*"
_LEGEND = 104  # characters beside each other, with 9 for a line and its distance
UNKNOWN = "#e3e3e3"  # behind cells without a number
_REFERENCE_DASHES: tuple[Literal[":", "-."], ...] = (":", "-.")


@dataclass(frozen=True)
class Line:
    """A line ``y`` over ``x``, with NaN where nothing was measured.

    ``style``: its style number (:func:`~trainer.plotting.style_numbers`). ``low``, ``high``:
    its interval at every x. ``raw``: unsmoothed values, drawn thin. ``is_context``: it is drawn
    pale and without its label, marker and interval.
    """

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    raw: Sequence[float] | None = None
    is_context: bool = False

    @property
    def colour(self) -> str:
        """Colour of its style."""
        if self.is_context:
            return PALE
        if self.style == 0:
            return BLACK
        return COLOURS[1 + (self.style - 1) % (len(COLOURS) - 1)]


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines and points; ``x``, ``y``: labels of the axes.

    ``prepare``: sets scales, ticks and limits, after points and lines and before references are
    drawn. ``vertical``: a reference line, as x and name. ``horizontal``: others, as y and name.
    ``faint`` ``[n, x]``: thin lines over the first line's x, from dark to light. ``points``: ``[n,
    2]`` by the name of their group. ``index`` ``[n]``: number of every point of the only group, its
    colour, which has a colour bar in place of a legend.
    """

    title: str = ""
    lines: Sequence[Line] = ()
    x: str = ""
    y: str = ""
    prepare: Callable[[Axes], object] | None = None
    vertical: tuple[float, str] | None = None
    horizontal: tuple[tuple[float, str], ...] = ()
    faint: Array | None = None
    points: Mapping[str, Array] = field(default_factory=dict)
    index: Array | None = None


@dataclass(frozen=True)
class Grid:
    """Panels in rows of ``columns`` where the figure is as wide as two columns of a paper.

    ``height``: inches of a row. ``x``, ``y``: labels of the whole figure, instead of the panels'.
    ``share``: all panels have the same axes. ``narrow``: the figure is one column wide in any
    style.
    """

    columns: int = 3
    height: float = 2.4
    x: str = ""
    y: str = ""
    share: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class ColourScale:
    """Colours of maps, from ``low`` to ``high`` (None: from the values of all maps); ``signed``:
    colours for values around 0, from ``-high``."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    signed: bool = False


class Plot(NamedTuple):
    """A figure; ``name``: name of its files, unique in a page; ``caption``: axes and source."""

    name: str
    figure: Figure
    caption: str


def graded(title: str, across: Array, up: Array, index: Array, **others: Any) -> Panel:
    """Return a panel of points with a colour by ``index``, from arrays of one shape; ``others``:
    further arguments of the panel."""
    across, up, index = np.broadcast_arrays(across, up, index)
    points = {"": np.column_stack([across.ravel(), up.ravel()])}
    return Panel(title, points=points, index=index.ravel(), **others)


def over_heads(
    label: str, style: int, x: Sequence[float], values: Array, *, median: bool = False
) -> Line:
    """Return the mean (or median) over heads of ``values`` ``[layers, heads, x]``, NaN for none,
    with the interval that holds 80% of the heads."""
    rows = values.reshape(-1, values.shape[-1])
    low, high = np.nanquantile(rows, [0.1, 0.9], axis=0).tolist()
    average = np.nanmedian if median else np.nanmean
    return Line(label, style, x, average(rows, axis=0).tolist(), low, high)


def draw(
    panels: Sequence[Panel],
    grid: Grid = Grid(),  # noqa: B008
    *,
    trained: int | None = None,
    index: str = "",
    label_ends: bool = False,
) -> Figure:
    """Draw panels with one legend and one colour bar; of panels beside each other that share a
    label of y, the first has it.

    ``trained``: the training length, if x is a number of tokens: the axis becomes logarithmic.
    ``index``: label of the colour bar. ``label_ends``: labels stand at the ends of the lines of
    each panel, in place of a legend.
    """
    numbers = [panel.index for panel in panels if panel.index is not None]
    top = max((float(np.nanmax(n)) for n in numbers if n.size), default=0.0)
    norm = Normalize(0, top or 1.0)
    with _figure(grid, len(panels)) as (figure, drawn, style):
        columns = min(style.columns(grid.columns), len(panels))
        most = max(sum(map(len, panel.points.values())) for panel in panels)
        # Many points in a small panel are small, so that they cover each other less.
        room = 420 * grid.height * style.width / columns
        size = float(np.clip(room / max(most, 1), 1.5, 14))
        for number, (axes, panel) in enumerate(zip(drawn, panels, strict=True)):
            _draw_points(axes, panel, norm, size)
            _draw_lines(axes, panel, trained)
            axes.set_title(panel.title, pad=4)
            if number % columns == 0 or panel.y != panels[number - 1].y:
                axes.set_ylabel(panel.y)
            if not grid.x:
                axes.set_xlabel(panel.x)
        if label_ends:
            for axes, panel in zip(drawn, panels, strict=True):
                _label_ends(axes, panel, grid.height / style.scale)
        else:
            _legend(figure, style)
        if numbers:
            are_integers = all(np.issubdtype(n.dtype, np.integer) for n in numbers)
            ticks = MaxNLocator(5, integer=True) if are_integers else None
            colours = ScalarMappable(norm, GRADED)
            figure.colorbar(colours, ax=drawn, label=index, pad=0.02, aspect=30, ticks=ticks)
    return figure


def heat_maps(
    panels: Mapping[str, Array],
    colours: ColourScale,
    grid: Grid,
    *,
    cell: tuple[int, int] = (1, 1),
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Figure:
    """Draw maps ``[rows, columns]`` by title, with row 0 at the top and NaN for no number.

    ``cell``: numbers of positions that a cell covers along x and y, which count from 0. ``names``:
    of the columns and of the rows, in a grid that shares its axes.
    """
    norm = _norm(list(panels.values()), colours)
    palette = mpl.colormaps["RdBu_r"] if colours.signed else mpl.colormaps["cividis"]
    wide, tall = cell
    with _figure(grid, len(panels)) as (figure, drawn, style):
        for axes, (title, values) in zip(drawn, panels.items(), strict=True):
            rows, columns = values.shape
            image = axes.imshow(
                np.ma.masked_invalid(values),
                cmap=palette.with_extremes(bad=(0, 0, 0, 0)),
                norm=norm,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, columns * wide - 0.5, rows * tall - 0.5, -0.5),
                rasterized=True,
            )
            axes.set_facecolor(UNKNOWN)
            axes.grid(visible=False)
            axes.set_title(title, pad=3)
            if names is None:
                axes.locator_params(integer=True, nbins=4)
            else:
                of_columns, of_rows = names
                axes.set_xticks(range(columns), of_columns, fontsize=6 * style.scale)
                axes.set_yticks(range(rows), of_rows, fontsize=6 * style.scale)
        look: dict[str, Any] = {"pad": 0.02, "aspect": 30, "format": "%g"}
        bar = figure.colorbar(image, ax=drawn, label=colours.label, **look)
        if colours.log:
            bar.minorformatter = FuncFormatter(_two_or_five)  # the default one writes formulas
    return figure


def _two_or_five(value: float, _: float) -> str:
    """Label the minor ticks of a logarithmic axis that are 2 or 5 times a power of ten."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _norm(maps: Sequence[Array], colours: ColourScale) -> Normalize:
    """Return one normalization for all maps; limits that are None come from their values."""
    known = np.concatenate([values[np.isfinite(values)] for values in maps])
    low, high = colours.low, colours.high
    if colours.log:
        known = known[known > 0]
    if not len(known):
        known = np.array([0.1, 1.0])
    # A thousandth of the cells may lie beyond the colours that have no end of their own.
    if colours.signed:
        size = high or np.quantile(np.abs(known), 0.999) or 1.0
        return Normalize(-size, size)
    if colours.log:
        least, most = np.quantile(known, [0.001, 1])
        return LogNorm(low or least, high or max(most, 1.001 * least))
    return Normalize(known.min() if low is None else low, known.max() if high is None else high)


@contextmanager
def _figure(grid: Grid, panels: int) -> Iterator[tuple[Figure, list[Axes], Style]]:
    """Give a figure without a window, its axes and the style, whose settings hold."""
    style = _style.get()
    if grid.narrow:
        style = replace(style, width=WIDTHS["single"])
    columns = min(style.columns(grid.columns), panels)
    rows = math.ceil(panels / columns)
    settings = style.settings()
    if columns > 3:  # titles of panels beside each other would touch
        settings["axes.titlesize"] = 6.5 * style.scale
        settings["xtick.labelsize"] = settings["ytick.labelsize"] = 6 * style.scale
    with mpl.rc_context(settings):
        # A narrow figure has more rows: smaller ones, so that it is no taller than a page.
        tallest = max(_PAGE, grid.height * math.ceil(panels / grid.columns) + 0.3)
        size = style.width, min(grid.height * rows + 0.3, tallest)
        figure = Figure(figsize=size, layout="constrained")
        share = grid.share
        cells = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
        used = list(cells.flat)[:panels]
        for axes in cells.flat[panels:]:
            axes.remove()
        if share:  # tick labels of x also above gaps of the last row
            for axes in used[-columns:]:
                axes.tick_params(labelbottom=True)
        if grid.x:
            figure.supxlabel(grid.x)
        if grid.y:
            figure.supylabel(grid.y)
        yield figure, used, style


def _label_ends(axes: Axes, panel: Panel, height: float) -> None:
    """Write labels beside the last points of lines, apart from each other. ``height``: of the panel
    in inches, in units of the default size of text."""
    lines = [line for line in panel.lines if not line.is_context and np.isfinite(line.y).any()]
    low, high = axes.get_ylim()
    to_share = axes.transData + axes.transAxes.inverted()

    def end(line: Line) -> float:
        last = np.flatnonzero(np.isfinite(line.y))[-1]
        return float(to_share.transform((line.x[last], line.y[last]))[1])

    line_height = 0.16 / height
    top = 1.0 + line_height
    for line in sorted(lines, key=end, reverse=True):
        text = textwrap.fill(line.label, 14)
        half = (1 + text.count("\n")) * line_height / 2
        place = min(end(line), top - half)
        top = place - half
        axes.annotate(
            text,
            (1.03, place),
            xycoords="axes fraction",
            va="center",
            color=line.colour,
            fontweight="bold",
            linespacing=1.0,
        )
    axes.set_ylim(low, high)


def _legend(figure: Figure, style: Style) -> None:
    """Draw one legend of all panels above them, lines before references."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    shown = sorted(handles.values(), key=lambda handle: -handle.get_zorder())
    look: dict[str, Any] = {"loc": "outside upper center", "frameon": False, "handlelength": 2.6}
    room = _LEGEND * style.width / WIDTHS["double"] / style.scale
    widths = [9 + len(handle.get_label()) for handle in shown]
    columns = len(shown)
    while sum(max(column) for column in np.array_split(widths, columns)) > room and columns > 1:
        columns -= 1
    rows = math.ceil(len(shown) / columns)  # three fit into the height of the panels
    figure.set_figheight(figure.get_figheight() + 0.16 * style.scale * max(0, rows - 3))
    figure.legend(handles=shown, ncols=columns, **look)


def _draw_points(axes: Axes, panel: Panel, norm: Normalize, size: float) -> None:
    """Draw groups of points, each in a colour of its own, or in colours by ``panel.index``."""
    look: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True}
    colours = chain(GROUPS[:1], cycle(GROUPS[1:]))
    for (name, group), colour in zip(panel.points.items(), colours, strict=False):
        if panel.index is None:
            look |= {"color": colour, "alpha": 0.5}
            axes.plot([], [], "o", color=colour, markersize=4, label=_shown(name))
        else:
            look |= {"c": panel.index, "cmap": GRADED, "norm": norm}
        axes.scatter(group[:, 0], group[:, 1], **look)


def _draw_lines(axes: Axes, panel: Panel, trained: int | None) -> None:
    """Draw the lines of a panel, thin ones first, and its references."""
    if panel.faint is not None:
        # One collection: a line each would make the SVG large.
        x = np.broadcast_to(np.asarray(panel.lines[0].x, float), panel.faint.shape)
        thin = list(np.stack([x, panel.faint], axis=-1))
        drawn = LineCollection(thin, linewidths=0.5, alpha=0.5, zorder=1, rasterized=True)
        drawn.set(array=np.arange(len(thin)), cmap=GRADED)
        axes.add_collection(drawn)
    for line in panel.lines:
        _draw_line(axes, line)
    across = [np.asarray(line.x) for line in panel.lines]
    across += [group[:, 0] for group in panel.points.values()]
    if across and (np.mod(np.concatenate(across), 1) == 0).all():  # they count, such as layers
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if panel.prepare is not None:
        panel.prepare(axes)
    look: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "zorder": 1}
    names = [*dict.fromkeys(name for _, name in panel.horizontal)]
    for height, name in panel.horizontal:
        dash = _REFERENCE_DASHES[names.index(name) % len(_REFERENCE_DASHES)]
        axes.axhline(height, linestyle=dash, label=name, **look)
    vertical = panel.vertical
    if trained is not None:
        _log_lengths(axes)
        vertical = trained, f"training length ({trained:,} tokens)"
    if vertical is not None:
        axes.axvline(vertical[0], linestyle="--", label=vertical[1], **look)


def _draw_line(axes: Axes, line: Line) -> None:
    """Draw a line in the colour, dashes and marker of its style, over its interval."""
    colour = line.colour
    if line.is_context:
        axes.plot(line.x, line.y, color=colour, linewidth=0.8, zorder=1.2)
        return
    if line.raw is not None:
        axes.plot(line.x, line.raw, color=colour, alpha=0.3, linewidth=0.6, zorder=2)
    if line.low is not None and line.high is not None:
        look: dict[str, Any] = {"alpha": 0.15, "linewidth": 0, "zorder": 1.5}
        axes.fill_between(line.x, line.low, line.high, color=colour, **look)
    dashes = _DASHES[max(0, line.style - 1) // (len(COLOURS) - 1) % len(_DASHES)]
    marker = ""
    if len(line.x) <= _MARKED:
        marker = _MARKERS[line.style % len(_MARKERS)]
    look = {"color": colour, "linestyle": dashes, "marker": marker, "zorder": 3}
    axes.plot(line.x, line.y, label=_shown(line.label), **look)


def _shown(label: str) -> str:
    """Return a label that a legend shows; matplotlib hides those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def log_if_wide(axes: Axes) -> None:
    """Make the y axis logarithmic if its values are positive and span a large factor."""
    low, high = axes.dataLim.intervaly
    if 0 < 5 * low < high:
        digits = [1.0]
        if high < 1e3 * low:
            digits = [1, 2, 5] if high > 20 * low else [1, 2, 3, 5, 7]
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=digits))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _log_lengths(axes: Axes) -> None:
    """Make the x axis logarithmic in tokens, with ticks at powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=7))
    axes.xaxis.set_major_formatter(_tokens)
    axes.xaxis.set_minor_locator(NullLocator())


def _tokens(value: float, _: float) -> str:
    """Return ``4k`` for 4096."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def diagonal(axes: Axes) -> None:
    """Draw the line x = y over the range of the points."""
    low, high = min(*axes.dataLim.min), max(*axes.dataLim.max)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    axes.locator_params(nbins=5)


def plane(axes: Axes) -> None:
    """Draw both axes through the origin."""
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.axvline(0, color=GREY, linewidth=0.5)
    axes.grid(visible=False)


def style_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct style number for every name.

    A name in :data:`STYLE_NUMBERS` gets its fixed number, also with "from scratch" or brackets.
    Other names, and names whose number is taken, get the lowest free one.
    """
    common = {name: re.sub(r" \([^)]*\)| from scratch", "", name) for name in names}
    numbers: dict[str, int] = {}
    for name in sorted(common, key=lambda n: (common[n] not in STYLE_NUMBERS, common[n] != n)):
        number = STYLE_NUMBERS.get(common[name])
        if number is None or number in numbers.values():
            number = next(n for n in count() if n not in numbers.values())
        numbers[name] = number
    return numbers


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem.png`` (300 dpi), ``stem.svg`` and ``stem.pdf``, all on white, with text as text
    and without dates; return the SVG's path."""
    for text in figure.findobj(Text):
        # A dollar sign in a name must not start a formula, as it does in ticks of logarithmic axes.
        if "$" in text.get_text() and r"\mathdefault" not in text.get_text():
            text.set_parse_math(False)
    with mpl.rc_context(_style.get().settings()):
        png = _rendered(figure, "png", metadata={"Software": None})
        figure.set_layout_engine(None)  # keep the layout: the others then match the PNG
        dates = {"Creator": None, "Producer": None, "CreationDate": None}
        pdf = _rendered(figure, "pdf", dpi=_CLOUD_DPI, metadata=dates)
        svg = _rendered(figure, "svg", dpi=_CLOUD_DPI, metadata={"Date": None, "Creator": None})
    write_atomically(Path(f"{stem}.png"), png)
    write_atomically(Path(f"{stem}.pdf"), pdf)
    write_atomically(Path(f"{stem}.svg"), svg)
    return Path(f"{stem}.svg")


def _rendered(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()
