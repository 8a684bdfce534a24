"""Style of figures on light and dark pages, and writing them to files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import Locator, MaxNLocator

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

DARK_INK = "#e8e6e3"
DARK_COLOURS = {
    "#000000": DARK_INK,
    "#0072b2": "#2f7ed1",
    "#009e73": "#1fbf92",
    "#d55e00": "#f0802e",
    "#707070": "#a3a09b",
    "#b0b0b0": "#6d6d6d",
    "#bbbbbb": "#666666",
    "#d0d0d0": "#4a4a4a",
    "#dcdcdc": "#444444",
    "#e4e4e4": "#3a3a3a",
}
"""Replacement on a dark page for each colour of a light page that would be hard to see there."""
ON_BRIGHT = "#010101"
"""A black that is not replaced on dark pages, for text on bright cells."""
UNKNOWN = (0.5, 0.5, 0.5, 0.22)
"""A grey close to the background of either page, for cells without a number."""

STYLE_NUMBERS = {
    "RoPE": 0,
    "RoPE + PI": 1,
    "RoPE + NTK-aware": 2,
    "RoPE + YaRN": 3,
    "DroPE": 4,
    "DroPE + temperature": 5,
    "NoPE from scratch": 6,
    "NoPE": 6,
    "NoPE from scratch + temperature": 7,
    "NoPE + temperature": 7,
    "HalfRoPE": 8,
    "High-frequency RoPE": 9,
    "high frequency": 9,
    "RoPE-ID": 10,
    "p-RoPE": 11,
    "HoPE": 12,
    "ALiBi": 13,
    "RoPE + cropped": 14,
    "RoPE + temperature": 15,
}
"""Fixed style numbers of common names, so that a method looks alike on all pages."""

_CLOUD_DPI = 200  # of the bitmaps in SVGs

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same everywhere
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


class Plot(NamedTuple):
    """A figure; ``name``: name of its files, unique in a page; ``caption``: axes and source."""

    name: str
    figure: Figure
    caption: str


def paper_style() -> AbstractContextManager[None]:
    """Return a context with the style of figures; it restores matplotlib's settings."""
    return mpl.rc_context(_RC)


def blank(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure of that size in inches, with constrained layout and no window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def whole_ticks(locator: Locator) -> None:
    """Place ticks at whole numbers only."""
    assert isinstance(locator, MaxNLocator)  # the locator of every linear axis
    locator.set_params(integer=True)


def style_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct style number for every name.

    A name in :data:`STYLE_NUMBERS` gets its fixed number, also if a checkpoint or directory
    follows it in brackets. Other names, and names whose number is taken, get the lowest free one of
    an unused colour, or else the lowest free one.
    """
    wanted = list(dict.fromkeys(names))
    fixed = {name: STYLE_NUMBERS.get(name.split(" (")[0]) for name in wanted}
    numbers: dict[str, int] = {}
    for name in sorted(wanted, key=lambda name: (fixed[name] is None, name not in STYLE_NUMBERS)):
        taken = {*numbers.values()}
        number = fixed[name]
        if number is None or number in taken:
            colours = {number % len(COLOURS) for number in taken}
            unused = (number for number in range(len(COLOURS)) if number not in colours)
            number = next(chain(unused, (number for number in count() if number not in taken)))
        numbers[name] = number
    return {name: numbers[name] for name in wanted}


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem.png`` (300 dpi, white) and ``stem.svg`` (transparent); return the SVG's path.

    The SVG follows the page's colour scheme. The files carry no dates.
    """
    path = stem.with_name(f"{stem.name}.svg")
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar sign in a name must not start a formula
    with paper_style():
        png = _rendered(figure, "png", metadata={"Software": None})
        figure.set_layout_engine(None)  # keep the layout: the SVG then matches the PNG
        metadata = {"Date": None, "Creator": None}
        svg = _rendered(figure, "svg", transparent=True, dpi=_CLOUD_DPI, metadata=metadata)
    write_atomically(stem.with_name(f"{stem.name}.png"), png)
    write_atomically(path, follow_scheme(svg.decode()))
    return path


def follow_scheme(svg: str) -> str:
    """Add rules to one of matplotlib's SVGs that make it readable on a dark page too.

    Programs that ignore colour schemes show it as on a light page.
    """
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK_COLOURS.items()
        for kind in ("fill", "stroke")
    ]
    # The root's fill applies where matplotlib sets none, which means black.
    dark = f":root{{fill:{DARK_INK}}}{''.join(rules)}"
    scheme = f":root{{color-scheme:light dark}}@media (prefers-color-scheme:dark){{{dark}}}"
    return svg.replace("</style>", f"{scheme}</style>", 1)


def _rendered(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()
