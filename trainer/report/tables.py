"""The tables of a report, and their forms for a terminal and Markdown."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from textwrap import wrap
from typing import TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from trainer.common.words import counted, factor_label, percent
from trainer.evaluation.outcomes import Outcomes, Row, row_name
from trainer.evaluation.results import PERPLEXITY, Cell, Report
from trainer.evaluation.statistics import KEPT, ROUNDING, Estimate

MISSING = "·"
UNCHANGED = "="
"""Mark of a cell whose method leaves the model as it is."""
EFFECTIVE_LEGEND = (
    f"Effective: the longest length, in tokens, up to which the score is at least {KEPT:.0%} of "
    "its value at the training length (≥: at every length measured; none: at the training length "
    "the score is at chance)."
)
WIDTH = 100
_CELL = len("131072 tokens")
_NAME = 19
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """Content of a cell: a value such as ``97.3`` and what is shown with it.

    ``interval``: ``92.4–99.1``, may be empty. ``mark``: ``↑`` or ``↓`` if significant, or
    :data:`UNCHANGED`. ``best``: whether it is the best of its column. ``loss``: the loss beside it.
    """

    value: str
    interval: str = ""
    mark: str = ""
    best: bool = False
    loss: str = ""


@dataclass(frozen=True)
class Table:
    """Table of a report, independent of the output format.

    ``note``: remarks on this table. ``legend``: meaning of the cells. ``columns``: two lines each,
    for a length and last the effective length. ``rows``: model, method and an entry for every
    column, None if not measured. ``detail``: whether it is of minor interest.
    """

    title: str
    note: str
    legend: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, tuple[Entry | None, ...]], ...]
    detail: bool = False


def tables(report: Report) -> list[Table]:
    """Return the mean over tasks if there are several, a table for each task, and perplexity.

    A single task has the held-out losses beside its scores if both were measured at the same
    lengths; perplexity is then a detail.
    """
    outcomes = Outcomes(report)
    made = []
    if outcomes.averaged:
        made.append(_scores(outcomes, "Mean over tasks", outcomes.averaged))
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    beside = len(outcomes.scored) == 1 and outcomes.lengths(outcomes.scored) == lengths
    for task in outcomes.scored:
        made.append(_scores(outcomes, outcomes.task(task), [task], with_losses=beside))
    return made + ([_perplexities(outcomes, lengths, beside)] if lengths else [])


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token, or infinity if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def highest(estimates: Mapping[K, Estimate | None]) -> list[K]:
    """Return the keys of the highest mean; equal means may differ by rounding."""
    means = {key: e.mean for key, e in estimates.items() if e is not None}
    best = max(means.values(), default=0.0)
    return [key for key, mean in means.items() if best - mean <= ROUNDING]


def interval(rate: Estimate) -> str:
    """Return ``92.4–99.1``, the 95% interval of a rate in percent."""
    return f"{percent(rate.low)}–{percent(rate.high)}"


def trials_of(cells: Sequence[Cell]) -> str:
    """Return ``256 trials``, ``2 to 4 trials`` or ``2,816 trials on 256 texts``."""
    trials = _range((len(cell.scores) for cell in cells), "trial")
    texts = f" on {_range((cell.texts for cell in cells), 'text')}"
    return trials + (texts if any(cell.groups for cell in cells) else "")


def _range(counts: Iterable[int], noun: str) -> str:
    least, *more = sorted({*counts})
    return f"{least:,} to {counted(more[-1], noun)}" if more else counted(least, noun)


def _scores(
    outcomes: Outcomes, title: str, tasks: list[str], *, with_losses: bool = False
) -> Table:
    lengths = outcomes.lengths(tasks)
    columns = []
    for length in lengths:
        column = _column(outcomes, tasks, length)
        if with_losses:
            losses = _losses(outcomes, length)
            column = {
                row: replace(entry, loss=f"{losses[row]:.3f}" if row in losses else MISSING)
                for row, entry in column.items()
            }
        columns.append(column)
    legend = _legend(outcomes)
    if with_losses:
        last = outcomes.report.last
        legend += f" Then the held-out loss in nats per token, on the last {last} tokens of each"
        legend += " window."
    heads = _heads(outcomes.report, lengths)
    reached = {row: outcomes.effective_length(row, tasks) for row in outcomes.rows}
    known = {row: effective for row, effective in reached.items() if effective is not None}
    if known:
        longest = max(effective.length for effective in known.values())
        heads.append(("effective", f"≥{KEPT:.0%} of 1×"))
        columns.append(
            {row: Entry(e.text, best=0 < e.length == longest) for row, e in known.items()}
        )
        legend += f" {EFFECTIVE_LEGEND}"
    return _table(outcomes, title, _trials(outcomes, tasks), legend, heads, columns)


def _column(outcomes: Outcomes, tasks: list[str], length: int) -> dict[Row, Entry]:
    """Return the entries of the rows that have an estimate, marked by their comparisons."""
    estimates = {row: outcomes.estimate(row, tasks, length) for row in outcomes.rows}
    best, column = highest(estimates), {}
    for row, rate in estimates.items():
        if rate is not None:
            comparison = outcomes.comparison(row, tasks, length)
            mark = "" if comparison is None else comparison.mark
            mark = UNCHANGED if outcomes.is_unchanged(row, tasks, length) else mark
            is_best = row in best and rate.mean > 0
            column[row] = Entry(percent(rate.mean), interval(rate), mark, is_best)
    return column


def _perplexities(outcomes: Outcomes, lengths: dict[int, float], detail: bool) -> Table:
    columns = []
    for length in lengths:
        losses = _losses(outcomes, length)
        least = min(losses.values()) if len({*losses.values()}) > 1 or len(losses) == 1 else None
        columns.append(
            {
                row: Entry(
                    _number(perplexity(loss)),
                    mark=UNCHANGED if outcomes.is_unchanged(row, [PERPLEXITY], length) else "",
                    best=loss == least,
                )
                for row, loss in losses.items()
            }
        )
    note = (
        f"exp of the mean loss on the last {outcomes.report.last} tokens of held-out sequences, "
        "the same at every length, so that more context only adds what lies before them."
    )
    heads = _heads(outcomes.report, lengths)
    legend = "Bold: the lowest of a column."
    return _table(outcomes, outcomes.task(PERPLEXITY), note, legend, heads, columns, detail)


def _number(value: float) -> str:
    """Return a perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _losses(outcomes: Outcomes, length: int) -> dict[Row, float]:
    cells = {row: outcomes.cell(row, PERPLEXITY, length) for row in outcomes.rows}
    return {row: c.last_loss for row, c in cells.items() if c and c.last_loss is not None}


def _heads(report: Report, lengths: dict[int, float]) -> list[tuple[str, str]]:
    """Return two lines for each length: ``2048 tokens`` and ``2×``."""
    trained = {report.trained: " (trained)"}
    return [
        (f"{length} tokens", factor_label(factor) + trained.get(length, ""))
        for length, factor in lengths.items()
    ]


def _table(
    outcomes: Outcomes,
    title: str,
    note: str,
    legend: str,
    columns: Iterable[tuple[str, str]],
    entries: list[dict[Row, Entry]],
    detail: bool = False,
) -> Table:
    """Return a table without the rows in which nothing was measured."""
    rows = tuple(
        (row[0], outcomes.method(row[1]), tuple(column.get(row) for column in entries))
        for row in outcomes.rows
        if any(row in column for column in entries)
    )
    if any(None in cells for *_, cells in rows):
        legend += f" {MISSING} not measured."
    if any(entry is not None and entry.mark == UNCHANGED for *_, cells in rows for entry in cells):
        legend += f" {UNCHANGED} the method changes nothing at this length."
    return Table(title, note, legend, tuple(columns), rows, detail)


def _trials(outcomes: Outcomes, tasks: list[str]) -> str:
    """Return the number of trials in a cell, and which of them are independent, as text."""
    cells = [c for c in outcomes.report.cells if c.task in tasks and c.scores]
    shared = " Arrows count each text once." if any(c.groups for c in cells) else ""
    if len(tasks) == 1:
        return f"{trials_of(cells)} a cell.{shared}"
    titles = ", ".join(outcomes.task(task) for task in tasks)
    return (
        f"Unweighted mean over {titles}; {trials_of(cells)} of each.{shared} Differences are "
        "tested on one score per text, its mean over the tasks with equally many texts."
    )


def _legend(outcomes: Outcomes) -> str:
    first = outcomes.name(outcomes.rows[0])
    others = f"; of other models as they are: {first}" if len(outcomes.models) > 1 else ""
    arrows = (
        " ↑ ↓ better or worse than the reference on the same trials (exact sign test, p < 0.05, "
        f"not corrected for the number of tests). Reference: the same model as it is{others}."
    )
    compared = any(outcomes.reference(row) in outcomes.rows for row in outcomes.rows)
    return (
        f"Success in %, with its 95% interval.{arrows if compared else ''} "
        "Bold: the highest of a column."
    )


def terminal_tables(report: Report, width: int = WIDTH) -> RenderableType:
    """Return every table but the details, at most ``width`` characters wide.

    A table with more lengths than fit continues below. A legend stands below the last of the tables
    that share it.
    """
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


def _terminal(table: Table, start: int, count: int) -> RichTable:
    chosen = slice(start, start + count)
    drawn = RichTable(
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
    for model, method, entries in table.rows:
        if before not in (None, model):
            drawn.add_section()
        name = row_name(model, method, first=model != before)
        # Methods are indented below their model's name.
        indent = ("", "") if model != before else ("  ", "    ")
        shown = wrap(name, _NAME, initial_indent=indent[0], subsequent_indent=indent[1])
        drawn.add_row(Text("\n".join(shown)), *map(_terminal_cell, entries[chosen]))
        before = model
    return drawn


def _terminal_cell(entry: Entry | None) -> Text:
    """Return a cell for the terminal, with its interval below it."""
    if entry is None:
        return Text(MISSING, style="dim")
    text = Text(f"{entry.value:>5}", style="bold" if entry.best else "")
    if entry.interval or entry.mark:
        text.append(entry.mark or " ", style={"↑": "green", "↓": "red"}.get(entry.mark, ""))
    if entry.loss:
        text.append(f"{entry.loss:>6}", style="cyan")
    if entry.interval:
        text.append(f"\n{entry.interval}", style="dim")
    return text


def markdown_tables(report: Report) -> str:
    """Return every table as Markdown under a heading; ends with a newline."""
    return "\n".join(map(_markdown, tables(report))) or "Nothing was evaluated.\n"


def _markdown(table: Table) -> str:
    lines = [
        ["model", "method", *(", ".join(column) for column in table.columns)],
        ["---", "---", *["---:"] * len(table.columns)],
        *([model, method, *map(_markdown_cell, entries)] for model, method, entries in table.rows),
    ]
    rows = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    body = "\n".join(f"| {row} |" for row in rows)
    return f"## {table.title}\n\n{table.note}\n\n{body}\n\n{table.legend}\n"


def _markdown_cell(entry: Entry | None) -> str:
    if entry is None:
        return MISSING
    value = f"**{entry.value}**" if entry.best else entry.value
    parts = (value, entry.interval and f"({entry.interval})", entry.mark)
    return " ".join(part for part in (*parts, entry.loss and f"/ {entry.loss}") if part)
