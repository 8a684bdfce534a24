"""Output on the terminal: tables and reports."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from trainer.report.answer import sentence
from trainer.report.report import VERDICTS, Report, troubles
from trainer.report.tables import MISSING, Cell, Table, legend, tables

WIDTH = 100
_OF_VERDICTS = {True: "green", False: "red", None: "dim"}
_OF_MARKS = {"↑": "green", "↓": "red", "": ""}


def print_tables(shown: Sequence[Table]) -> None:
    """Print tables at most :data:`WIDTH` characters wide."""
    out = _console()
    for table in shown:
        drawn = RichTable(
            title=Text(table.title, style="bold"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        drawn.add_column("\nmodel", overflow="fold")
        for head in table.columns:
            drawn.add_column(Text("\n".join(head)), justify="right", overflow="fold")
        for number, (name, cells) in enumerate(table.rows):
            indent = ""
            if name.startswith("+ "):
                indent = "  "
            elif number:
                drawn.add_section()
            drawn.add_row(Text(f"{indent}{name}"), *map(_cell, cells))
        out.print(drawn)
        out.print(Text(f"{table.note}\n", style="dim"))


def _console() -> Console:
    out = Console(highlight=False, markup=False)
    out.width = min(WIDTH, out.width) if out.is_terminal else WIDTH
    return out


def _cell(cell: Cell | None) -> Text:
    """Return a cell in one or two lines: its value with its mark, and its interval."""
    if cell is None:
        return Text(MISSING, style="dim")
    style = "bold" if cell.best else ""
    text = Text(cell.value, style=style)
    text.append(cell.mark or " ", style=_OF_MARKS[cell.mark])
    if cell.interval:
        text.append(f"\n{cell.interval}", style="dim")
    return text


def print_report(report: Report, run_dir: str) -> None:
    """Print the tables, the verdicts on the papers' claims, the answer, and the page's path."""
    means = report.over_seeds()
    shown = tables(means)
    print_tables(shown)
    out = _console()
    if shown:
        out.print(Text(f"{legend(shown)}\n", style="dim"))
    for warning in troubles(report.runs):
        out.print(Text(f"Warning: {warning}", style="bold red"))
    reason = ""
    for observation in report.observations:
        verdict = Text(f"{VERDICTS[observation.shown]:10}", style=_OF_VERDICTS[observation.shown])
        out.print(verdict, observation.claim)
        if observation.shown is None and observation.evidence != reason:
            reason = observation.evidence
            out.print(Text(f"{'':10} {reason}", style="dim"))
    for note in report.notes:
        out.print(f"Note: {note}")
    out.print(sentence(means))
    out.print(f"Report: {Path(run_dir) / 'report.html'}", soft_wrap=True)
