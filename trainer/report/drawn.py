"""A figure of a report: planned, and as it was written with its numbers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from trainer.report.atomic import write_atomically
from trainer.report.rendering import csv_text
from trainer.report.saving import save


@dataclass(frozen=True)
class Drawn:
    """A figure as it was written. ``path``: of the SVG. ``caption``: what is plotted, by which
    formula, after which figure. ``alt``: for someone who cannot see it. ``detail``: of less
    interest than the others."""

    path: Path
    title: str
    caption: str
    alt: str
    detail: bool = False


@dataclass(frozen=True)
class Plan:
    """A figure, and the ``rows`` of numbers under a ``head`` that it shows."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]
    head: Sequence[str]
    rows: Iterable[Sequence[Any]]
    detail: bool = False

    def write(self, stem: Path) -> Drawn:
        """Write ``stem.svg``, ``stem.png`` and ``stem.csv``."""
        path = save(self.draw(), stem.with_name(f"{stem.name}.svg"))
        write_atomically(path.with_suffix(".csv"), csv_text(self.head, self.rows))
        return Drawn(path, self.title, self.caption, self.alt, self.detail)
