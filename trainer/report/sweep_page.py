"""All renderings of a sweep as files of a directory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from trainer.report.atomic import write_atomically
from trainer.report.plotting import paper_style
from trainer.report.rendering import base64, render
from trainer.report.sweep import Sweep
from trainer.report.sweep_figures import sweep_figure
from trainer.report.sweep_table import (
    csv_sweep,
    entries,
    facts,
    heads,
    legend,
    markdown_sweep,
    unfinished,
)
from trainer.report.words import counted

PAGE = "report.html"


def write_sweep_report(sweep: Sweep, made: dict[str, str], directory: Path) -> Path:
    """Write ``table.md``, ``table.csv``, ``figures/sweep.*`` and ``report.html``; return the page.

    ``made``: when, by which command and program, in words by their terms. Raises ``OSError`` as the
    file system does.
    """
    write_atomically(directory / "table.md", markdown_sweep(sweep))
    write_atomically(directory / "table.csv", csv_sweep(sweep))
    with paper_style():
        plans = sweep_figure(sweep)
        figures = [plan.write(directory / "figures" / plan.name) for plan in plans]
    found = entries(sweep)
    text = render(
        "sweep.html.j2",
        {"embedded": base64, "counted": counted},
        sweep=sweep,
        report=SimpleNamespace(made=made),
        troubles=unfinished(sweep),
        legend=legend(sweep),
        heads=heads(sweep),
        rows=[
            (
                name,
                run,
                [found[factor].get(run.place) for factor in sweep.factors],
                facts(run),
                _page_of(run.place, directory),
            )
            for name, run in zip(sweep.names, sweep.runs, strict=True)
        ],
        figures=figures,
    )
    write_atomically(directory / PAGE, text)
    return directory / PAGE


def _page_of(place: str, directory: Path) -> str | None:
    """A run's own page as seen from the directory; None where it has none."""
    page = Path(place, PAGE)
    return os.path.relpath(page, directory) if page.is_file() else None
