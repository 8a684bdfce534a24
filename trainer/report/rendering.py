"""What the files of all reports are made with: pages from templates, and CSV."""

from __future__ import annotations

import csv
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

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


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under their head, each line ended by a newline alone."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
