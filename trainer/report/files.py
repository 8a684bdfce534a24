"""FILESDOC"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from trainer.common.files import csv_text, write_atomically
from trainer.plotting.style import save
from trainer.report.mathml import mathml


def render(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """A template of ``templates/``, filled in and escaped. ``filters``: beside ``pretty`` and
    ``mathml``."""
    page = Environment(
        loader=PackageLoader("trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {"pretty": lambda data: json.dumps(data, indent=2, ensure_ascii=False)}
    page.filters |= {"mathml": mathml}
    page.filters |= filters
    return page.get_template(template).render(**values)


def base64(path: Path) -> str:
    """The content of a file, for a ``data:`` address."""
    return b64encode(path.read_bytes()).decode()


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
