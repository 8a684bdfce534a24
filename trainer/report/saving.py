"""A figure in a file, as a picture and as a drawing."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from trainer.report.atomic import write_atomically
from trainer.report.dark import follows_scheme

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
