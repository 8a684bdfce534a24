"""The pages of runs and analyses, with their figures in and beside them.

A page is one HTML file that opens anywhere: no network, no scripts, and figures inside.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer import plotting
from trainer.analysis.results import Results, summary
from trainer.common.files import write_atomically
from trainer.plotting import Plot, save
from trainer.report.answer import sentence
from trainer.report.figures import plots
from trainer.report.report import VERDICTS, Report, troubles
from trainer.report.tables import TABLE, Table, legend, percent, tables, write_tables

PAGE = "report.html"
VARIABLES = {
    "#ffffff": "paper",
    plotting.BLACK: "ink",
    plotting.BLUE: "blue",
    plotting.SKY: "sky",
    plotting.GREEN: "green",
    plotting.ORANGE: "orange",
    plotting.AMBER: "amber",
    plotting.PINK: "pink",
    plotting.GREY: "grey",
    plotting.PALE: "pale",
    plotting.GRID: "grid",
    plotting.UNKNOWN: "unknown",
}
"""Variables of the style sheet that stand for the colours of figures."""


def write_renderings(report: Report, directory: Path) -> None:
    """Write ``figures/NAME.svg``, ``.pdf`` and ``.png``, ``tables/NAME.tex`` and ``.md``, and
    ``report.html`` with all of them in it, in the place of those of an earlier report."""
    for pattern in ("tables/[0-9]*", "figures/*.svg", "figures/*.pdf", "figures/*.png"):
        for path in directory.glob(pattern):
            path.unlink()
    means = report.over_seeds()
    shown = tables(means)
    write_tables(shown, directory / "tables")
    counts = Counter(VERDICTS[observation.shown] for observation in report.observations)
    _write(
        "report.html.j2",
        directory,
        report=report,
        lead=sentence(means),
        tally=", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word]),
        troubles=troubles(report.runs),
        tables=shown,
        legend=legend(shown),
        figures=_saved(plots(means), directory / "figures"),
        verdicts=VERDICTS,
        made=report.made,
        details={"Settings": report.config, "Environment": report.environment},
    )


def write_comparison(shown: Sequence[Table], directory: Path, made: dict[str, str]) -> Path:
    """Write the page of runs side by side, and return its path; ``made``: see :class:`Report`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write("comparison.html.j2", directory, tables=shown, made=made, details={})
    return directory / PAGE


def write_analysis(
    directory: Path, results: Sequence[Results], training_length: int, **texts: Any
) -> Path:
    """Write the page, ``TOPIC/NAME.svg``, ``.png`` and ``.pdf`` of every figure, and
    ``results.csv``; return the path of the page.

    ``training_length``: tokens at which tables show values besides the longest. ``texts``: ``name``
    of the model; ``lead``, model and text in words; ``made``, date, command, program and inputs by
    term; ``details``, settings and environment as plain values.
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
    _write("analysis.html.j2", directory, shown=shown, **texts)
    return directory / PAGE


def _saved(plots: Iterable[Plot], directory: Path) -> list[dict[str, str]]:
    """Write the figures; return what the page shows of them."""
    shown = []
    for plot in plots:
        svg = save(plot.figure, directory / plot.name).read_text("utf-8")
        drawing = inline(svg, f"{directory.name}-{plot.name}", plot.caption)
        shown.append({"name": plot.name, "caption": plot.caption, "svg": drawing})
    return shown


def inline(svg: str, name: str, label: str) -> Markup:
    """Return a drawing as a part of a page, whose style sheet chooses its colours; ``name``
    distinguishes its identifiers, ``label`` is for screen readers."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
    for colour, variable in VARIABLES.items():
        drawing = drawing.replace(colour.lower(), f"var(--{variable})")
    return Markup(
        drawing.replace("<svg", Markup('<svg role="img" aria-label="{}"').format(label), 1)
    )


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
    """Return a number with four digits and commas for thousands, and nothing for NaN."""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
