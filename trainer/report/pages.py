"""The pages of runs and analyses, with their figures in and beside them.

A page is one HTML file that opens anywhere: no network, no scripts, and figures inside.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from trainer.analysis.results import Results, summary
from trainer.common.files import write_atomically
from trainer.plotting import Plot, save
from trainer.report.figures import plots
from trainer.report.report import VERDICTS, Report, troubles
from trainer.report.tables import LEGEND, TABLE, percent, rate, tables

PAGE = "report.html"


def write_renderings(report: Report, directory: Path) -> None:
    """Write ``figures/NAME.svg`` and ``.png``, and ``report.html`` with the figures in it."""
    counts = Counter(VERDICTS[observation.shown] for observation in report.observations)
    _write(
        "report.html.j2",
        directory,
        report=report,
        lead=lead(report),
        tally=", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word]),
        troubles=troubles(report.runs),
        tables=tables(report),
        legend=LEGEND,
        figures=_saved(plots(report), directory / "figures"),
        verdicts=VERDICTS,
        made=report.made,
        details={"Settings": report.config, "Environment": report.environment},
    )


def write_analysis(
    directory: Path,
    results: Sequence[Results],
    *,
    name: str,
    training_length: int,
    lead: str,
    made: dict[str, str],
    details: dict[str, Any],
) -> Path:
    """Write the page of analyses, ``TOPIC/NAME.svg`` and ``.png`` of every figure, and
    ``results.csv``; return the path of the page.

    ``name``: of the model. ``training_length``: tokens at which tables show values besides the
    longest. ``lead``: model and text. ``made``: date, command, program and inputs, as text by term.
    ``details``: settings and environment as plain values.
    """
    shown = []
    for result in results:
        table = summary(result.rows, training_length)
        empty = [c for c in table.columns if (table[c].fillna("") == "").all()]
        figures = _saved(result.plots, directory / result.key)
        shown.append((result, figures, table.drop(columns=empty)))
    directory.mkdir(parents=True, exist_ok=True)
    rows = pd.concat([result.rows for result in results], ignore_index=True)
    rows.to_csv(directory / TABLE, index=False, float_format="%.8g")
    values = {"name": name, "lead": lead, "shown": shown, "made": made, "details": details}
    _write("analysis.html.j2", directory, **values)
    return directory / PAGE


def _saved(plots: Iterable[Plot], directory: Path) -> list[dict[str, str]]:
    """Write the figures; return what the page shows of them, with the drawing for its URL."""
    return [
        {
            "title": plot.name.replace("_", " "),
            "caption": plot.caption,
            "svg": b64encode(save(plot.figure, directory / plot.name).read_bytes()).decode(),
        }
        for plot in plots
    ]


def _write(template: str, directory: Path, **values: Any) -> None:
    """Fill in a template of ``templates/`` with escaped values."""
    page = Environment(
        loader=PackageLoader("trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "pretty": lambda data: json.dumps(data, indent=2, ensure_ascii=False),
        "percent": percent,
        "thousands": lambda number: f"{number:,}".replace(",", "\u202f"),
        "cell": _cell,
    }
    write_atomically(directory / PAGE, page.get_template(template).render(**values))


def _cell(value: Any) -> str:
    """Return a cell of the table of an analysis as text."""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def lead(report: Report) -> str:
    """Return the highest score at the longest length as a sentence; empty without scores."""
    if not report.scored:
        return ""
    task = report.scored[0]
    rows = report.rows[report.rows.task == task].dropna(subset="value")
    far = rows[rows.length == rows.length.max()]
    best = far.loc[far.value.idxmax()]
    return (
        f"Trained at {report.trained} tokens and tested at up to {best.length}, where "
        f"{report.row_name((best.model, best.method))} scores highest in {report.tasks[task]}: "
        f"{rate(best)}."
    )
