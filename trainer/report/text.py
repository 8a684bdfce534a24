"""The tables of a report for a terminal of 80 columns or more, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap

from rich import box
from rich import table as rich_table
from rich.console import Group, RenderableType
from rich.text import Text

from trainer.report.outcomes import Outcomes, row_name
from trainer.report.rendering import csv_text
from trainer.report.results import Report
from trainer.report.table import MISSING, Entry, Table, tables

WIDTH = 100
_CELL = len("131072 tokens")
_NAME = 19

CSV_HEAD = (
    "model",
    "method",
    "task",
    "length",
    "factor",
    "n",
    "score",
    "low",
    "high",
    "p_value",
    "loss",
    "seconds",
)


def terminal_tables(report: Report, width: int = WIDTH) -> RenderableType:
    """Every table but the details, at most ``width`` columns wide; one with more lengths than fit,
    which are four in 80 columns, continues below. What the cells mean stands below the last table
    that it is true of."""
    fitting = max(1, (width - _NAME) // (_CELL + 1))
    shown: list[RenderableType] = []
    made = [table for table in tables(report) if not table.detail]
    for table, following in pairwise([*made, None]):
        assert table is not None
        for start in range(0, len(table.columns), fitting):
            shown.append(_terminal(table, start, fitting))
        shown.append(Text(f"{table.note}\n", style="dim"))
        if following is None or following.legend != table.legend:
            shown.append(Text(f"{table.legend}\n", style="dim"))
    return Group(*shown)


def markdown_tables(report: Report) -> str:
    """Every table under a heading of its own; ends with a newline."""
    return "\n".join(_markdown(table) for table in tables(report))


def csv_table(report: Report) -> str:
    """One row a cell, numbers in full; ``n`` counts trials, or windows of a loss; ``score``,
    ``low`` and ``high`` are fractions, ``p_value`` is that of the exact sign test with the row's
    reference, ``loss`` is in nats per token. Empty: not measured."""
    outcomes, rows = Outcomes(report), []
    for cell in report.cells:
        row = (cell.model, cell.method)
        own = outcomes.estimate(row, [cell.task], cell.length) if cell.scores else None
        held = outcomes.comparison(row, [cell.task], cell.length) if cell.scores else None
        rows.append(
            (
                *(cell.model, cell.method, cell.task, cell.length, cell.factor),
                len(cell.scores or cell.by_window) or "",
                *((own.mean, own.low, own.high) if own else ("", "", "")),
                held.p_value if held else "",
                cell.last_loss,
                cell.seconds,
            )
        )
    return csv_text(CSV_HEAD, rows)


def _terminal(table: Table, start: int, count: int) -> rich_table.Table:
    chosen = slice(start, start + count)
    drawn = rich_table.Table(
        title=Text(table.title + (" (continued)" if start else ""), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    drawn.add_column("\nmodel", overflow="fold", width=_NAME)
    for head in table.columns[chosen]:
        drawn.add_column(Text("\n".join(head)), justify="right", width=_CELL, overflow="fold")
    before = None
    followers = [*table.rows[1:], None]
    for (model, method, entries), following in zip(table.rows, followers, strict=True):
        name = row_name(model, method, first=model != before)
        # At blanks and hyphens where there are any; below the model's name its methods.
        indent = ("", "") if model != before else ("  ", "    ")
        shown = wrap(name, _NAME, initial_indent=indent[0], subsequent_indent=indent[1])
        cells = [terminal_cell(entry) for entry in entries[chosen]]
        last = following is None or following[0] != model
        drawn.add_row(Text("\n".join(shown)), *cells, end_section=last)
        before = model
    return drawn


def terminal_cell(entry: Entry | None) -> Text:
    """What stands in a cell, its interval below it."""
    if entry is None:
        return Text(MISSING, style="dim")
    text = Text(f"{entry.value:>5}", style="bold" if entry.best else "")
    if entry.interval:
        text.append(entry.mark or " ", style={"↑": "green", "↓": "red"}.get(entry.mark, ""))
    if entry.loss:
        text.append(f"{entry.loss:>6}", style="cyan")
    if entry.interval:
        text.append(f"\n{entry.interval}", style="dim")
    return text


def _markdown(table: Table) -> str:
    head = ["model", "method", *(", ".join(column) for column in table.columns)]
    lines = [
        head,
        ["---", "---", *["---:"] * len(table.columns)],
        *([model, method, *map(markdown_cell, entries)] for model, method, entries in table.rows),
    ]
    body = "\n".join(map(markdown_row, lines))
    return f"## {table.title}\n\n{table.note}\n\n{body}\n\n{table.legend}\n"


def markdown_cell(entry: Entry | None) -> str:
    """What stands in a cell, in one line."""
    if entry is None:
        return MISSING
    value = f"**{entry.value}**" if entry.best else entry.value
    interval = entry.interval and f"({entry.interval})"
    parts = (value, interval, entry.mark, entry.loss and f"/ {entry.loss}")
    return " ".join(part for part in parts if part)


def markdown_row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
