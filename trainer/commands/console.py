"""Output on the terminal: reports, logs and progress."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from trainer.common.progress import console
from trainer.evaluation.results import Report, troubles
from trainer.report.tables import terminal_tables

WIDTH = 100


def set_up_console(quiet: bool = False) -> None:
    """Show the program's log without the logs of its libraries.

    ``quiet``: show errors only, as for all processes of a run except the first.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        if not console.is_terminal:
            console.width = WIDTH
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
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
    if report.cells:
        out.print(terminal_tables(report, out.width))
    if (drop := report.drop) is not None:
        before, after, end = map(_loss, (drop.loss_before, drop.loss_after, drop.loss_end))
        out.print(
            f"Drop after step {drop.step}: held-out loss {before} before, {after} just after, "
            f"{end} at the end of recalibration.",
            highlight=False,
        )
    for index, arm in enumerate(report.arms):
        for change in arm.changes:
            if index or drop is None or change.step != drop.step:
                losses = " to ".join(map(_loss, (change.loss_after, change.loss_end)))
                out.print(
                    f"{arm.name}, after step {change.step}: {change.what}; held-out loss at "
                    f"{change.length:,} tokens {_loss(change.loss_before)} before, then {losses}.",
                    highlight=False,
                    markup=False,
                )
    for trouble in troubles(report.arms):
        out.print(Text(f"Warning: {trouble}", style="bold red"))
    marks = {True: "[green]shown[/]", False: "[red]not shown[/]", None: "[dim]not judged[/]"}
    for observation in report.observations:
        verdict = f"{marks[observation.shown]}: {escape(observation.claim)}"
        out.print(f"{verdict} [dim]({escape(observation.source)})[/]")
        if not observation.shown:
            out.print(Padding(Text(observation.evidence, style="dim"), (0, 0, 0, 4)))
    for note in report.notes:
        out.print(f"Note: {note}", highlight=False, markup=False)
    if existing:
        out.print("This run was finished before; nothing was trained. overwrite=true starts again.")
    out.print(f"Report: {Path(run_dir) / 'report.html'}", highlight=False, markup=False)


CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
"""Visible characters in place of control characters."""


def show(text: str, end: str = "\n") -> None:
    """Print text immediately; escape control characters on a terminal."""
    print(text.translate(CONTROLS) if sys.stdout.isatty() else text, end=end, flush=True)
