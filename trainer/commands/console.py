"""What a person sees on the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from trainer.report.results import Report
from trainer.report.table import terminal_table

WIDTH = 100


def set_up_console() -> None:
    """Show the program's own log, without the noise of the libraries below it."""
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        handler = RichHandler(
            console=Console(stderr=True),
            show_path=False,
            show_level=False,
            omit_repeated_times=False,
        )
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def print_report(report: Report, run_dir: str, existing: bool) -> None:
    """The table, the observations in words, and where the rest lies."""
    console = Console(width=WIDTH)
    console.print(terminal_table(report))
    marks = {True: "[green]shown[/]", False: "[red]not shown[/]", None: "[dim]not judged[/]"}
    for observation in report.observations:
        console.print(
            f"{marks[observation.shown]}: {observation.claim} [dim]{observation.source}[/]"
        )
    if existing:
        console.print(
            "This run was finished before; nothing was trained. overwrite=true starts again."
        )
    console.print(f"Report: {Path(run_dir) / 'report.html'}", highlight=False)
