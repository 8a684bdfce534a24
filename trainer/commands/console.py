"""Output on the terminal: reports, logs and progress."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.common.progress import console
from trainer.common.words import remedy, without_controls
from trainer.evaluation.benchmarks import Score, Scored, comparisons
from trainer.evaluation.outcomes import AS_IS, Outcomes
from trainer.evaluation.results import STATEMENTS, Drop, Report, is_known, troubles
from trainer.evaluation.statistics import Comparison
from trainer.report.tables import terminal_tables

if TYPE_CHECKING:
    from trainer.workflows.benchmarks import Benchmarks
    from trainer.workflows.plan import Section

WIDTH = 100


def set_up_console(quiet: bool = False) -> None:
    """Show the program's log without the logs of its libraries.

    ``quiet``: show errors only, as all processes except the first do in any case.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        if not console.is_terminal:
            console.width = WIDTH
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet or rank != "0" else logging.INFO)
    logger.propagate = False


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _about_drop(drop: Drop | None) -> Iterator[str]:
    """Yield the losses before and after a drop, and the page to read if the loss rose later."""
    if drop is None:
        return
    before, after, end = map(_loss, (drop.loss_before, drop.loss_after, drop.loss_end))
    yield (
        f"Drop after step {drop.step}: held-out loss {before} before, {after} just after, {end} at "
        "the end of recalibration."
    )
    if is_known(drop.loss_end) and is_known(drop.loss_after) and drop.loss_end > drop.loss_after:
        yield f"The loss rose in recalibration. {remedy('loss')}"


def _at_chance(report: Report) -> list[str]:
    """Return the models whose retrieval at the training length is at chance without a method."""
    outcomes = Outcomes(report)
    if STATEMENTS not in outcomes.scored:
        return []
    rows = [(model, AS_IS) for model in outcomes.models]
    lengths = {row: outcomes.effective_length(row, [STATEMENTS]) for row in rows}
    return [
        model
        for (model, _), effective in lengths.items()
        if effective is not None and not effective.length
    ]


def report_console() -> Console:
    """Return the console for tables, at most :data:`WIDTH` columns wide."""
    out = Console()
    out.width = min(WIDTH, out.width) if out.is_terminal else WIDTH
    return out


def print_report(report: Report, run_dir: str, existing: bool) -> None:
    """Print the tables, the observations in words, and the path of the page."""
    out = report_console()
    say = partial(out.print, highlight=False, markup=False)
    if report.cells:
        out.print(terminal_tables(report, out.width))
    drop = report.drop
    for text in _about_drop(drop):
        say(text)
    for index, arm in enumerate(report.arms):
        for change in arm.changes:
            if index or drop is None or change.step != drop.step:
                losses = " to ".join(map(_loss, (change.loss_after, change.loss_end)))
                say(
                    f"{arm.name}, after step {change.step}: {change.what}; held-out loss at "
                    f"{change.length:,} tokens {_loss(change.loss_before)} before, then {losses}."
                )
    if warnings := troubles(report.arms):
        for warning in warnings:
            out.print(Text(f"Warning: {warning}", style="bold red"))
        say(remedy("nan"))
    if names := _at_chance(report):
        about = f"Retrieval at the training length is at chance: {', '.join(names)}."
        say(f"{about} {remedy('retrieval')}")
    marks = {True: "[green]shown[/]", False: "[red]not shown[/]", None: "[dim]not judged[/]"}
    for observation in report.observations:
        verdict = f"{marks[observation.shown]}: {escape(observation.claim)}"
        out.print(f"{verdict} [dim]({escape(observation.source)})[/]")
        if not observation.shown:
            out.print(Padding(Text(observation.evidence, style="dim"), (0, 0, 0, 4)))
    for note in report.notes:
        say(f"Note: {note}")
    if existing:
        say("This run was finished before; nothing was trained. overwrite=true starts again.")
    say(f"Report: {Path(run_dir) / 'report.html'}")


def show(text: str, end: str = "\n") -> None:
    """Print text immediately; escape control characters on a terminal."""
    print(without_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


COLUMNS = 4
"""Models with methods that fit into the terminal side by side."""


def print_benchmarks(results: Benchmarks, path: Path) -> None:
    """Print the scores of benchmarks as tables, and the path of their numbers."""
    out = Console(width=WIDTH, highlight=False)
    for begin in range(0, len(results.scored), COLUMNS):
        out.print(benchmark_table(results.scored[begin : begin + COLUMNS], results.scored))
    if len(results.scored) > 1:
        out.print(
            "↑ and ↓: other than the model as is, or than the first model, on the same questions, "
            "p < 0.05 by the sign test."
        )
    for note in results.notes:
        out.print(f"Note: {note}", markup=False)
    out.print(f"Numbers: {path}", markup=False)


def benchmark_table(columns: Sequence[Scored], scored: Sequence[Scored]) -> Table:
    """Return a table with a row for every metric of every task and a column for each of
    ``columns``, compared with their counterparts among ``scored``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("task", "metric"):
        table.add_column(head, overflow="fold")
    table.add_column("questions", justify="right")
    for column in columns:
        table.add_column(escape(column.name), justify="right", overflow="fold")
    previous = ""
    rows = zip(*(column.scores for column in columns), strict=True)
    changes = zip(*(comparisons(column, scored) for column in columns), strict=True)
    for row, changed in zip(rows, changes, strict=True):
        score = row[0]
        if previous not in ("", score.task):
            table.add_section()
        task = score.task if score.task != previous else ""
        previous = score.task
        cells = map(_cell, row, changed)
        table.add_row(escape(task), escape(score.metric), str(score.questions), *cells)
    return table


def _cell(score: Score, change: Comparison | None) -> str:
    error = f" ± {score.standard_error:.3f}" if score.standard_error is not None else ""
    mark = f" {change.mark}" if change is not None and change.mark else ""
    return f"{score.value:.3f}{error}{mark}"


def print_sections(sections: Iterable[Section]) -> None:
    """Print each section of a plan as a table."""
    out = Console(width=WIDTH)
    for section in sections:
        table = Table(section.title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in section.rows:
            table.add_row(*map(Text, row))
        out.print(table, highlight=False)
        out.print()
