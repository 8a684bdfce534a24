"""Style of figures, and writing them to files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text

from trainer.common.files import write_atomically

WIDTH = 6.75
"""Width of a figure in inches: the text width of a two-column paper."""

# Okabe and Ito's palette for colour-blind readers, without its yellow, which fades on white.
BLACK, BLUE, SKY, GREEN = "#000000", "#0072B2", "#56B4E9", "#009E73"
ORANGE, AMBER, PINK = "#D55E00", "#E69F00", "#CC79A7"
GREY = "#707070"
COLOURS = (BLACK, BLUE, SKY, GREEN, ORANGE, AMBER, PINK)
"""Colours of styles 0 to 6; later styles repeat them with other dashes."""
GRADED = ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
"""Perceptually uniform colours for a number, without the yellow that fades on white."""

_FIXED = (
    *("RoPE", "RoPE + PI", "RoPE + NTK-aware", "RoPE + YaRN", "DroPE", "DroPE + temperature"),
    *("NoPE", "NoPE + temperature", "HalfRoPE", "High-frequency RoPE", "RoPE-ID", "p-RoPE"),
    *("HoPE", "ALiBi", "RoPE + cropped", "RoPE + temperature"),
)
STYLE_NUMBERS = {name: number for number, name in enumerate(_FIXED)}
"""Fixed style numbers of common names, so that a method looks alike on all pages."""

_CLOUD_DPI = 200  # of the bitmaps in SVGs

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
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
    "savefig.dpi": 300,
    "svg.fonttype": "path",  # looks the same without the font
    "svg.hashsalt": "unrope",  # otherwise the identifiers in the file are random
}


class Plot(NamedTuple):
    """A figure; ``name``: name of its files, unique in a page; ``caption``: axes and source."""

    name: str
    figure: Figure
    caption: str


def paper_style() -> AbstractContextManager[None]:
    """Return a context with the style of figures; it restores matplotlib's settings."""
    return mpl.rc_context(_RC)


def blank(height: float) -> Figure:
    """Return an empty figure :data:`WIDTH` wide and as high, in inches, with constrained layout and
    no window."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct style number for every name.

    A name in :data:`STYLE_NUMBERS` gets its fixed number, also with "from scratch", or with a
    checkpoint or directory in brackets after it. Other names, and names whose number is taken, get
    the lowest free one.
    """
    common = {name: name.split(" (")[0].removesuffix(" from scratch") for name in names}
    numbers: dict[str, int] = {}
    for name in sorted(common, key=lambda n: (common[n] not in STYLE_NUMBERS, common[n] != n)):
        number = STYLE_NUMBERS.get(common[name])
        if number is None or number in numbers.values():
            number = next(n for n in count() if n not in numbers.values())
        numbers[name] = number
    return numbers


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem.png`` (300 dpi) and ``stem.svg``, both on white and without dates; return the
    SVG's path."""
    path = stem.with_name(f"{stem.name}.svg")
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar sign in a name must not start a formula
    with paper_style():
        png = _rendered(figure, "png", metadata={"Software": None})
        figure.set_layout_engine(None)  # keep the layout: the SVG then matches the PNG
        metadata = {"Date": None, "Creator": None}
        svg = _rendered(figure, "svg", dpi=_CLOUD_DPI, metadata=metadata)
    write_atomically(stem.with_name(f"{stem.name}.png"), png)
    write_atomically(path, svg)
    return path


def _rendered(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()
