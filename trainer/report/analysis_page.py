"""The page of an analysis: one HTML file with figures inside, files and ``results.csv`` beside
it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from trainer.analysis.topic import Results, summary
from trainer.common.files import write_atomically
from trainer.plotting.style import WIDTH, save
from trainer.report.files import base64, render

PAGE, TABLE = "report.html", "results.csv"
_WIDEST = 52  # width in rem of a figure as wide as the text


@dataclass(frozen=True)
class AnalysisReport:
    """Content of the page of an analysis.

    ``training_length``: tokens at which tables show values besides the longest. ``lead``: model and
    text. ``made``: date, command, program and inputs, as text by term. ``details``: settings and
    environment as plain values.
    """

    name: str
    training_length: int
    lead: str
    results: Sequence[Results]
    made: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of all results."""
        return pd.concat([result.rows for result in self.results], ignore_index=True)


def write_analysis(report: AnalysisReport, directory: Path) -> Path:
    """Write ``TOPIC/NAME.svg`` and ``.png`` of every figure, ``results.csv`` and ``report.html``;
    return the path of the page."""
    shown = []
    for result in report.results:
        figures = []
        for plot in result.plots:
            svg = base64(save(plot.figure, directory / result.key / plot.name))
            width = f"{min(plot.figure.get_figwidth() / WIDTH, 1) * _WIDEST:.1f}rem"
            figures.append((svg, width, plot.caption))
        table = summary(result.rows, report.training_length)
        empty = [c for c in table.columns if (table[c].fillna("") == "").all()]
        shown.append((result, figures, table.drop(columns=empty)))
    directory.mkdir(parents=True, exist_ok=True)
    report.rows.to_csv(directory / TABLE, index=False, float_format="%.8g")
    text = render(
        "geometry.html.j2",
        {"cell": _cell},
        report=report,
        shown=shown,
        made=report.made,
        details=report.details,
    )
    write_atomically(directory / PAGE, text)
    return directory / PAGE


def _cell(value: Any) -> str:
    """Return a cell of a table as text."""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
