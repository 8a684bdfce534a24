"""Output on the terminal: reports, logs and progress."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.common.processes import is_first_process
from trainer.common.progress import console
from trainer.evaluation.results import Report, troubles
from trainer.report.tables import tables, terminal_tables

WIDTH = 100


def set_up_console(quiet: bool = False) -> None:
    """Show the program's log without the logs of its libraries.

    ``quiet``: show errors only, as all processes except the first do in any case.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        if not console.is_terminal:
            console.width = WIDTH
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet or not is_first_process() else logging.INFO)
    logger.propagate = False


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def report_console() -> Console:
    """Return the console for tables, at most :data:`WIDTH` columns wide."""
    out = Console()
    out.width = min(WIDTH, out.width) if out.is_terminal else WIDTH
    return out


def print_report(report: Report, run_dir: str, existing: bool) -> None:
    """Print the tables, the observations in words, and the path of the page."""
    out = report_console()
    say = partial(out.print, highlight=False, markup=False)
    if not report.rows.empty:
        out.print(terminal_tables(tables(report), out.width))
    for arm in report.arms:
        for change in arm.changes:
            before, after, end = map(
                _loss, (change.loss_before, change.loss_after, change.loss_end)
            )
            say(
                f"{arm.name}, after step {change.step}: {change.what}; held-out loss at "
                f"{change.length:,} tokens {before} before, {after} just after, {end} at the end."
            )
    for warning in troubles(report.arms):
        out.print(Text(f"Warning: {warning}", style="bold red"))
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


def print_benchmarks(table: Table, directory: Path) -> None:
    """Print the table of benchmarks, and the directory of their numbers."""
    out = Console(width=WIDTH, highlight=False)
    out.print(table)
    out.print(f"Numbers: {directory / 'results.csv'}", markup=False)


def print_plan(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print the tables of a plan, by title."""
    out = Console(width=WIDTH)
    for title, rows in tables.items():
        table = Table(title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in rows.items():
            table.add_row(*map(Text, row))
        out.print(table, highlight=False)
        out.print()
