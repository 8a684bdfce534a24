"""All renderings of a report as files of a directory."""

from __future__ import annotations

from pathlib import Path

from trainer.report.atomic import write_atomically
from trainer.report.drawn import Drawn
from trainer.report.figures import write_figures
from trainer.report.html import write_html
from trainer.report.latex import latex_tables
from trainer.report.results import Report
from trainer.report.text import csv_table, markdown_tables


def write_renderings(report: Report, directory: Path) -> list[Drawn]:
    """Write ``table.md``, ``table.tex``, ``table.csv``, ``figures/`` and ``report.html``, all of
    which depend on the report alone; return the figures.

    ``report.json`` is not among them: written last, by :meth:`Report.write`, it says that all are
    there. Raises ``OSError`` as the file system does.
    """
    write_atomically(directory / "table.md", markdown_tables(report))
    write_atomically(directory / "table.tex", latex_tables(report))
    write_atomically(directory / "table.csv", csv_table(report))
    figures = write_figures(report, directory / "figures")
    write_html(report, figures, directory / "report.html")
    return figures
