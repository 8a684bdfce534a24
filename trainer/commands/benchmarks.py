"""``python -m trainer evaluate checkpoint=PATH +evaluation=multiple_choice ...``: what it knows."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.commands.console import WIDTH
from trainer.evaluation.benchmarks import Score
from trainer.workflows.benchmarks import run_benchmarks
from trainer.workflows.evaluation_request import BenchmarkRequest


def show(request: BenchmarkRequest, name: str) -> None:
    """Score ``checkpoint`` (and those in ``compare``), print a table, write JSON."""
    scores, path = run_benchmarks(request, name)
    out = Console(width=WIDTH)
    out.print(table(scores))
    out.print(f"Numbers: {path}", highlight=False, markup=False)


def table(scores: dict[str, list[Score]]) -> Table:
    """One row for every metric of every task, one column for every model."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("task", "metric"):
        made.add_column(head, overflow="fold")
    made.add_column("questions", justify="right")
    for name in scores:
        made.add_column(escape(name), justify="right", overflow="fold")
    previous = ""
    for row in zip(*scores.values(), strict=True):
        score = row[0]
        if previous not in ("", score.task):
            made.add_section()
        task = score.task if score.task != previous else ""
        previous = score.task
        made.add_row(task, score.metric, str(score.questions), *map(_cell, row))
    return made


def _cell(score: Score) -> str:
    error = f" ± {score.standard_error:.3f}" if score.standard_error is not None else ""
    return f"{score.value:.3f}{error}"
