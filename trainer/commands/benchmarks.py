"""``python -m trainer evaluate checkpoint=PATH +evaluation=multiple_choice ...``: what it knows."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.commands.console import WIDTH
from trainer.evaluation.benchmarks import Score, Scored, comparisons
from trainer.evaluation.statistics import Comparison
from trainer.workflows.benchmarks import run_benchmarks
from trainer.workflows.requests import BenchmarkRequest

COLUMNS = 4
"""Models with methods that fit into the terminal side by side."""


def show(request: BenchmarkRequest, name: str) -> None:
    """Score ``checkpoint`` (and those in ``compare``) with every method, print tables, write
    JSON."""
    found, path = run_benchmarks(request, name)
    out = Console(width=WIDTH)
    for begin in range(0, len(found.scored), COLUMNS):
        out.print(table(found.scored[begin : begin + COLUMNS], found.scored))
    if len(found.scored) > 1:
        out.print(
            "↑ and ↓: other than the model as is, or than the first model, on the same questions, "
            "p < 0.05 by the sign test.",
            highlight=False,
        )
    for note in found.notes:
        out.print(f"Note: {note}", highlight=False, markup=False)
    out.print(f"Numbers: {path}", highlight=False, markup=False)


def table(shown: Sequence[Scored], scored: Sequence[Scored]) -> Table:
    """Return a table with a row for every metric of every task and a column for each of
    ``shown``, compared with their counterparts among ``scored``."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("task", "metric"):
        made.add_column(head, overflow="fold")
    made.add_column("questions", justify="right")
    for one in shown:
        made.add_column(escape(one.name), justify="right", overflow="fold")
    previous = ""
    rows = zip(*(one.scores for one in shown), strict=True)
    changes = zip(*(comparisons(one, scored) for one in shown), strict=True)
    for row, changed in zip(rows, changes, strict=True):
        score = row[0]
        if previous not in ("", score.task):
            made.add_section()
        task = score.task if score.task != previous else ""
        previous = score.task
        cells = map(_cell, row, changed)
        made.add_row(escape(task), escape(score.metric), str(score.questions), *cells)
    return made


def _cell(score: Score, change: Comparison | None) -> str:
    error = f" ± {score.standard_error:.3f}" if score.standard_error is not None else ""
    mark = f" {change.mark}" if change is not None and change.mark else ""
    return f"{score.value:.3f}{error}{mark}"
