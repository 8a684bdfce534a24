"""Output on the terminal: tables, reports and the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from trainer.common.processes import is_first_process
from trainer.common.progress import console
from trainer.evaluation.results import Report, troubles
from trainer.report.tables import MISSING, Cell, Table, tables

WIDTH = 100
_NAME, _CELL = 19, len("131072 tokens")


def set_up_console() -> None:
    """Show the program's log, of processes other than the first errors only, without the logs of
    its libraries."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        if not console.is_terminal:
            console.width = WIDTH
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_first_process() else logging.ERROR)
    logger.propagate = False


def print_tables(shown: Sequence[Table]) -> None:
    """Print tables at most :data:`WIDTH` characters wide.

    A table with more lengths than fit continues below. A legend stands below the last of the tables
    that share it.
    """
    out = _console()
    fitting = max(1, (out.width - _NAME) // (_CELL + 1))
    for table, following in pairwise([*shown, None]):
        assert table is not None
        for start in range(0, len(table.columns), fitting):
            out.print(_drawn(table, slice(start, start + fitting)))
        legend = "" if following and following.legend == table.legend else table.legend
        for text in filter(None, (table.note, legend)):
            out.print(Text(f"{text}\n", style="dim"))


def _console() -> Console:
    out = Console()
    out.width = min(WIDTH, out.width) if out.is_terminal else WIDTH
    return out


def _drawn(table: Table, columns: slice) -> RichTable:
    drawn = RichTable(
        title=Text(table.title + (" (continued)" if columns.start else ""), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    drawn.add_column("\nmodel", overflow="fold", width=_NAME)
    for head in table.columns[columns]:
        drawn.add_column(Text("\n".join(head)), justify="right", width=_CELL, overflow="fold")
    for number, (is_first, name, cells) in enumerate(table.rows):
        if is_first and number:
            drawn.add_section()
        # Methods are indented below their model's name.
        indent = ("", "") if is_first else ("  ", "    ")
        lines = wrap(name, _NAME, initial_indent=indent[0], subsequent_indent=indent[1])
        drawn.add_row(Text("\n".join(lines)), *map(_cell, cells[columns]))
    return drawn


def _cell(cell: Cell | None) -> Text:
    """Return a cell with its interval below it."""
    if cell is None:
        return Text(MISSING, style="dim")
    text = Text(f"{cell.value:>5}", style="bold" if cell.best else "")
    if cell.interval or cell.mark:
        text.append(cell.mark or " ", style={"↑": "green", "↓": "red"}.get(cell.mark, ""))
    if cell.loss:
        text.append(f"{cell.loss:>6}", style="cyan")
    if cell.interval:
        text.append(f"\n{cell.interval}", style="dim")
    return text


def print_report(report: Report, run_dir: str, existing: bool) -> None:
    """Print the tables, the observations in words, and the path of the page."""
    print_tables(tables(report))
    out = _console()
    say = partial(out.print, highlight=False, markup=False)
    for run in report.runs:
        for change in run.changes:
            losses = (change[f"loss_{when}"] for when in ("before", "after", "end"))
            before, after, end = ("?" if x is None else f"{x:.3f}" for x in losses)
            say(
                f"{run.name}, after step {change['step']}: {change['what']}; held-out loss "
                f"at {change['length']:,} tokens {before} before, {after} just after, {end} at the "
                "end."
            )
    for warning in troubles(report.runs):
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


def print_plan(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print the tables of a plan, by title."""
    out = Console(width=WIDTH)
    for title, rows in tables.items():
        table = RichTable(title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in rows.items():
            table.add_row(*map(Text, row))
        out.print(table, highlight=False)
        out.print()
