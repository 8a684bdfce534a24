"""Describe a figure in lines of text, which a test compares with what it must show.

The description holds panels, labels, scales, the names in legends, and the numbers and names of
everything drawn. Colours, dashes, markers, sizes, limits and ticks are a matter of taste.
"""

from __future__ import annotations

import csv
import re
from textwrap import dedent, wrap

import numpy as np
from matplotlib.ticker import FixedFormatter
from rich.console import Console

WIDE = 84


def check(figure, expected, panel=None):
    """Hold a figure against its description, or its panel of this number from 1 on."""
    text = described(figure)
    if panel is not None:
        text = f"panel {text.split('panel ')[panel]}"
    check_text(text, expected)


def check_csv(path, expected):
    """Hold a file of numbers, shown to four digits, against its lines."""
    with path.open(newline="") as file:
        rows = [", ".join(map(_cell, row)) for row in csv.reader(file)]
    check_text("\n".join(rows), expected)


def check_text(text, expected):
    """Hold a text against another that is indented as a whole."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    assert lines == dedent(expected).strip("\n").rstrip(" ").rstrip("\n").splitlines()


STYLES = {"1": "bold", "2": "dim", "3": "italic", "31": "red", "32": "green", "36": "cyan"}


def styled(renderable, width):
    """What a terminal shows, with the names of styles in angle brackets."""
    console = Console(width=width, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(renderable)
    text = re.sub(r"\x1b\[0m", "</>", capture.get())
    return re.sub(r"\x1b\[([\d;]+)m", lambda code: f"<{_styles(code[1])}>", text)


def _styles(codes):
    return " ".join(STYLES[code] for code in codes.split(";"))


def _cell(text):
    try:
        return _number(text)
    except ValueError:
        return text


def described(figure):
    """Return the panels of a figure in their order, with labels and legends."""
    lines = []
    for axes in figure.axes:
        lines += _bar(axes) if hasattr(axes, "_colorbar") else _panel(axes)
    for side, text in (("below", figure._supxlabel), ("left", figure._supylabel)):
        lines += [] if text is None else [f"{side} {text.get_text()!r}"]
    for legend in figure.legends:
        lines.append(f"legend {', '.join(repr(text.get_text()) for text in legend.get_texts())}")
    return "\n".join("\n".join(_wrapped(line)) for line in lines)


def _wrapped(line):
    indent = "  " if line.startswith("  ") else ""
    return wrap(
        line.strip(),
        WIDE,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _number(value):
    return f"{float(value):.4g}"


def _numbers(values):
    values = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan).ravel().tolist()
    if len(values) > 24:
        return f"{len(values)} from {_number(values[0])} to {_number(values[-1])}"
    return " ".join(map(_number, values))


def _path(points):
    points = list(points)
    if len(points) > 24:
        return f"{len(points)} from {_numbers(points[0])} to {_numbers(points[-1])}"
    return ", ".join(map(_numbers, points))


def _panel(axes):
    spec = axes.get_subplotspec()
    rows, columns = spec.get_gridspec().get_geometry()
    place = f"{spec.rowspan.start + 1},{spec.colspan.start + 1} of {rows}x{columns}"
    titles = [axes.get_title(loc) for loc in ("left", "center", "right")]
    lines = [" ".join(("panel", place, *(repr(title) for title in titles if title)))]
    lines += [_axis(axes, name) for name in "xy"]
    bars = [bar for bar in axes.containers if hasattr(bar, "has_yerr")]
    parts = [part for bar in bars for part in _parts(bar)]
    for artist in axes.get_children():
        if artist not in parts and (describe := _SAID.get(type(artist).__name__)):
            text = describe(artist, axes)
            lines += [f"  {text}"] if text else []
    return lines + [f"  {_intervals(bar)}" for bar in bars]


def _axis(axes, name):
    axis = getattr(axes, f"{name}axis")
    text = f"  {name} {axis.get_scale()}"
    text += f" {axis.get_label_text()!r}" if axis.get_label_text() else ""
    return text + _names(axis)


def _names(axis):
    """Tick labels that are given names, such as those of depths or runs."""
    if not isinstance(axis.get_major_formatter(), FixedFormatter):
        return ""
    return f" named {' '.join(repr(text.get_text()) for text in axis.get_majorticklabels())}"


def _bar(axes):
    return [f"bar {axes.get_ylabel()!r} {_scale(axes._colorbar.mappable)}{_names(axes.yaxis)}"]


def _scale(mappable):
    norm = mappable.norm
    kind = type(norm).__name__.replace("Normalize", "")
    return f"{kind} {_number(norm.vmin)}..{_number(norm.vmax)}".strip()


def _name(artist):
    label = str(artist.get_label())
    return "" if not label or label.startswith("_") else f" {label!r}"


def _line(artist, axes):
    x, y = artist.get_data()
    if not len(x):  # an entry of a legend
        return ""
    if artist.get_transform() == axes.get_xaxis_transform(which="grid"):
        data = f"upright at {_number(x[0])}"
    elif artist.get_transform() == axes.get_yaxis_transform(which="grid"):
        data = f"level at {_number(y[0])}"
    else:
        data = f"x {_numbers(x)}; y {_numbers(y)}"
    return f"line{_name(artist)}: {data}"


def _points(artist, _):
    x, y = np.ma.filled(np.ma.asarray(artist.get_offsets(), dtype=float), np.nan).T
    graded = artist.get_array()
    scaled = "" if graded is None else f" {_scale(artist)} of {_numbers(graded)}"
    return f"points{_name(artist)}{scaled}: x {_numbers(x)}; y {_numbers(y)}"


def _lines(artist, _):
    return f"lines: {'; '.join(map(_path, artist.get_segments())) or 'none'}"


def _area(artist, _):
    (path,) = artist.get_paths()
    return f"area: {_path(path.vertices)}"


def _steps(artist, _):
    """A histogram: every corner above its ground, once."""
    corners = dict.fromkeys((x, y) for x, y in artist.get_xy().tolist() if y)
    return f"area{_name(artist)}: {_path(corners)}"


def _rows(values):
    return " / ".join(map(_numbers, values))


def _mesh(artist, _):
    edges = artist.get_coordinates()
    x, y = _numbers(edges[0, :, 0]), _numbers(edges[:, 0, 1])
    return f"cells {_scale(artist)}: x {x}; y {y}; {_rows(artist.get_array())}"


def _image(artist, _):
    return f"image {_scale(artist)}, from {_numbers(artist.get_extent())}: " + _rows(
        artist.get_array()
    )


def _arc(artist, _):
    turn = f"{_number(artist.theta1)} to {_number(artist.theta2)} degrees"
    size = f"{_number(artist.width)} x {_number(artist.height)}"
    return f"arc: {size} around {_numbers(artist.get_center())}, {turn}"


def _note(artist, _):
    if artist.arrow_patch is not None:
        return f"arrow: {_numbers(artist.xyann)} to {_numbers(artist.xy)}"
    return f"note {artist.get_text()!r}: {_numbers(artist.xy)}"


def _text(artist, axes):
    if artist.get_transform() != axes.transData:  # a title
        return ""
    return f"text {artist.get_text()!r}: {_numbers(artist.get_position())}"


def _span(artist, axes):
    if artist is axes.patch:
        return ""
    return f"span: {_number(artist.get_x())}, {_number(artist.get_width())} wide"


def _parts(bar):
    line, caps, bars = bar.lines
    return [line, *caps, *bars]


def _intervals(bar):
    line, _, (bars,) = bar.lines
    marks = "" if line is None else " x {}; y {};".format(*map(_numbers, line.get_data()))
    return f"bars:{marks} {'; '.join(map(_path, bars.get_segments()))}"


_SAID = {
    "Line2D": _line,
    "PathCollection": _points,
    "LineCollection": _lines,
    "PolyCollection": _area,
    "FillBetweenPolyCollection": _area,
    "Polygon": _steps,
    "QuadMesh": _mesh,
    "AxesImage": _image,
    "Arc": _arc,
    "Annotation": _note,
    "Text": _text,
    "Rectangle": _span,
}
