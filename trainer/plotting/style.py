"""How figures look and how they are saved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from trainer.common.files import write_atomically

INK = "#e8e6e3"
COLOURS = {
    "#000000": INK,
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
"""Of a light page, and what stands for each on a dark one; others are clear on both."""

ON_BRIGHT = "#010101"
"""A black that stays black, for what is written on bright cells."""

UNKNOWN = (0.5, 0.5, 0.5, 0.22)
"""A grey that is near the ground of either page, for cells without a number."""

_STYLE = "</style>"


def follows_scheme(svg: str) -> str:
    """A drawing of matplotlib's with a transparent ground, readable on a light page and on a dark
    one; programs that know no colour schemes show it as on a light page."""
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in COLOURS.items()
        for kind in ("fill", "stroke")
    ]
    # Black is what matplotlib fills with where it says nothing.
    dark = f":root{{fill:{INK}}}{''.join(rules)}"
    own = f":root{{color-scheme:light dark}}@media (prefers-color-scheme:dark){{{dark}}}"
    return svg.replace(_STYLE, own + _STYLE, 1)


NUMBERS = {
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
"""Of what many pages show; see :class:`~trainer.plotting.lines.Series`."""


def looks(names: Iterable[str]) -> dict[str, int]:
    """A number for every name, which no two share.

    A name of :data:`NUMBERS` has the one that stands there, also where a checkpoint or a directory
    is named in brackets behind it; where that is taken, and for other names, it is the least that
    is free.
    """
    wanted = list(dict.fromkeys(names))
    found: dict[str, int] = {}
    for plain in (lambda name: name, lambda name: name.split(" (")[0]):
        for name in wanted:
            number = NUMBERS.get(plain(name))
            if name not in found and number is not None and number not in found.values():
                found[name] = number
    free = (number for number in count() if number not in found.values())
    return {name: found[name] if name in found else next(free) for name in wanted}


CLOUD_DPI, COARSE_DPI = 200, 120  # of clouds of points that are one picture in a drawing
LARGEST_SVG = 500_000
"""Bytes of a drawing whose points are all drawn one by one."""


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem.png`` (300 dpi, white) and ``stem.svg`` (transparent, of the page's colour
    scheme), without dates; return the latter's path. Clouds of points that would make the SVG
    larger than :data:`LARGEST_SVG` are one picture in it, a coarse one where it is still large."""
    path = stem.with_suffix(".svg")
    for text in figure.findobj(Text):  # in a name, dollars begin no formula
        text.set_text(re.sub(r"(?<!\\)\$", r"\\$", text.get_text()))
    png = _rendered(figure, "png", metadata={"Software": None})
    figure.set_layout_engine(None)  # its places are found: the next format has the same
    svg = _drawing(figure, CLOUD_DPI)
    if len(svg) > LARGEST_SVG:
        for cloud in (cloud for axes in figure.axes for cloud in axes.collections):
            cloud.set_rasterized(True)
        svg = _drawing(figure, CLOUD_DPI)
    if len(svg) > 2 * LARGEST_SVG:
        svg = _drawing(figure, COARSE_DPI)
    write_atomically(path.with_suffix(".png"), png)
    write_atomically(path, follows_scheme(svg.decode()))
    return path


def _drawing(figure: Figure, dpi: int) -> bytes:
    metadata = {"Date": None, "Creator": None}
    return _rendered(figure, "svg", transparent=True, dpi=dpi, metadata=metadata)


def _rendered(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()
