"""Parts of all pages: templates, and figures written to files."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from trainer.common.words import counted


def render(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """Fill in a template of ``templates/`` with escaped values.

    ``filters`` come in addition to ``pretty`` and ``counted``.
    """
    page = Environment(
        loader=PackageLoader("trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "pretty": lambda data: json.dumps(data, indent=2, ensure_ascii=False),
        "counted": counted,
        **filters,
    }
    return page.get_template(template).render(**values)


def base64(path: Path) -> str:
    """Return the content of a file for a ``data:`` URL."""
    return b64encode(path.read_bytes()).decode()


@dataclass(frozen=True)
class Plot:
    """A figure of a page.

    ``caption``: what is plotted, by which formula, and the figure it follows. ``alt``: text for
    readers who cannot see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
