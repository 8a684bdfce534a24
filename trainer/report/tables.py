"""The tables of a report, and their forms for a terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from textwrap import wrap
from typing import TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from trainer.common.files import csv_text
from trainer.common.words import counted, factor_label, percent
from trainer.evaluation.outcomes import Outcomes, Row, row_name
from trainer.evaluation.results import PERPLEXITY, Cell, Report
from trainer.evaluation.statistics import (
    KEPT,
    ROUNDING,
    EffectiveLength,
    Estimate,
)

MISSING = "·"
UNCHANGED = "="
"""Mark of a cell whose method leaves the model as it is."""
UNMEASURED = "Nothing was evaluated."
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """Content of a cell: a value such as ``97.3`` and what is shown with it.

    ``interval``: ``92.4–99.1``, may be empty. ``mark``: ``↑`` or ``↓`` if significant, or
    :data:`UNCHANGED`.
    ``best``: whether it is the best of its column. ``loss``: the loss beside it.
    """

    value: str
    interval: str = ""
    mark: str = ""
    best: bool = False
    loss: str = ""


@dataclass(frozen=True)
class Table:
    """Table of a report, independent of the output format.

    ``key``: name in links. ``note``: remarks on this table. ``legend``: meaning of the cells.
    ``columns``: two lines each, for a length or a label, and last the effective length. ``rows``:
    model, method and an entry for every column, None if not measured. ``detail``: whether it is of
    minor interest.
    """

    key: str
    title: str
    note: str
    legend: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, tuple[Entry | None, ...]], ...]
    detail: bool = False


def tables(report: Report) -> list[Table]:
    """Return the mean over tasks if there are several, a table for each task, and perplexity of
    all and of key tokens.

    The first two are followed by averages by label if trials have labels. A single task has the
    held-out losses beside its scores if both were measured at the same lengths; perplexity is then
    a detail.
    """
    outcomes = Outcomes(report)
    made = []
    if outcomes.averaged:
        made.append(_scores(outcomes, "summary", "Mean over tasks", outcomes.averaged))
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    beside = len(outcomes.scored) == 1 and outcomes.lengths(outcomes.scored) == lengths
    for task in outcomes.scored:
        made.append(_scores(outcomes, task, outcomes.task(task), [task], with_losses=beside))
    return made + _perplexity(outcomes, PERPLEXITY, _of_last(report), detail=beside)


def _heads(report: Report, lengths: dict[int, float]) -> list[tuple[str, str]]:
    """Return two lines for each length: ``2048 tokens`` and ``2×``."""
    return [
        (
            f"{length} tokens",
            f"{factor_label(factor)}{' (trained)' if length == report.trained else ''}",
        )
        for length, factor in lengths.items()
    ]


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token, or infinity if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def tied(values: Iterable[float]) -> bool:
    """Whether several values are all equal, so that none is the best."""
    values = list(values)
    return len(values) > 1 and len(set(values)) == 1


def number(value: float) -> str:
    """Return a perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _scores(
    outcomes: Outcomes, key: str, title: str, tasks: list[str], with_losses: bool = False
) -> Table:
    lengths = outcomes.lengths(tasks)

    def column(length: int) -> dict[Row, Entry]:
        estimates = {row: outcomes.estimate(row, tasks, length) for row in outcomes.rows}
        entries = _column(outcomes, estimates, tasks, length)
        if not with_losses:
            return entries
        losses = _losses(outcomes, length)
        return {
            row: replace(entry, loss=f"{losses[row]:.3f}" if row in losses else MISSING)
            for row, entry in entries.items()
        }

    legend = _legend(outcomes)
    if with_losses:
        legend += (
            " Then the held-out loss in nats per token, on the last "
            f"{outcomes.report.last} tokens of each window."
        )
    heads, columns = _heads(outcomes.report, lengths), [column(length) for length in lengths]
    effective_lengths = {row: outcomes.effective_length(row, tasks) for row in outcomes.rows}
    if effective := effective_entries(effective_lengths):
        heads.append(EFFECTIVE_HEAD)
        columns.append(effective)
        legend += f" {EFFECTIVE_LEGEND}"
    return _table(outcomes, key, title, _trials(outcomes, tasks), legend, heads, columns)


EFFECTIVE_HEAD = ("effective", f"≥{KEPT:.0%} of 1×")
EFFECTIVE_LEGEND = (
    f"Effective: the longest length, in tokens, up to which the score is at least {KEPT:.0%} of "
    "its value at the training length (≥: at every length measured; none: at the training length "
    "the score is at chance)."
)


def effective_entries(lengths: Mapping[K, EffectiveLength | None]) -> dict[K, Entry]:
    """Return the column of effective lengths, without those that are None."""
    known = {key: effective for key, effective in lengths.items() if effective is not None}
    longest = max((effective.length for effective in known.values()), default=0)
    return {
        key: Entry(effective.text, best=0 < effective.length == longest)
        for key, effective in known.items()
    }


def _losses(outcomes: Outcomes, length: int, task: str = PERPLEXITY) -> dict[Row, float]:
    cells = {row: outcomes.cell(row, task, length) for row in outcomes.rows}
    return {row: c.last_loss for row, c in cells.items() if c and c.last_loss is not None}


def _of_last(report: Report) -> str:
    return (
        f"exp of the mean loss on the last {report.last} tokens of held-out "
        "sequences, the same tokens at every length, so that more context only adds what lies "
        "before them."
    )


def _perplexity(outcomes: Outcomes, task: str, note: str, detail: bool) -> list[Table]:
    lengths = outcomes.lengths([task], losses=True)
    columns = []
    for length in lengths:
        losses = _losses(outcomes, length, task)
        least = None if tied(losses.values()) else min(losses.values())
        columns.append(
            {
                row: Entry(
                    number(perplexity(loss)),
                    mark=UNCHANGED if outcomes.is_unchanged(row, [task], length) else "",
                    best=loss == least,
                )
                for row, loss in losses.items()
            }
        )
    legend = "Bold: the lowest of a column."
    title = outcomes.task(task)
    if not columns:
        return []
    return [
        _table(
            outcomes, task, title, note, legend, _heads(outcomes.report, lengths), columns, detail
        )
    ]


def _column(
    outcomes: Outcomes,
    estimates: dict[Row, Estimate | None],
    tasks: list[str],
    length: int,
) -> dict[Row, Entry]:
    """Return the entries of the rows that have an estimate, marked by their comparisons."""
    best, column = highest(estimates), {}
    for row, rate in estimates.items():
        if rate is not None:
            comparison = outcomes.comparison(row, tasks, length)
            mark = "" if comparison is None else comparison.mark
            mark = UNCHANGED if outcomes.is_unchanged(row, tasks, length) else mark
            is_best = row in best and rate.mean > 0
            column[row] = Entry(percent(rate.mean), interval(rate), mark, is_best)
    return column


def highest(estimates: Mapping[K, Estimate | None]) -> list[K]:
    """Return the keys of the highest mean; equal means may differ by rounding."""
    means = {key: e.mean for key, e in estimates.items() if e is not None}
    best = max(means.values(), default=0.0)
    return [key for key, mean in means.items() if best - mean <= ROUNDING]


def interval(rate: Estimate) -> str:
    """Return ``92.4–99.1``, the 95% interval of a rate in percent."""
    return f"{percent(rate.low)}–{percent(rate.high)}"


def _table(
    outcomes: Outcomes,
    key: str,
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
    return Table(key, title, note, legend, tuple(columns), rows, detail)


def _trials(outcomes: Outcomes, tasks: list[str]) -> str:
    """Return the number of trials in a cell, and which of them are independent, as text."""
    cells = [c for c in outcomes.report.cells if c.task in tasks and c.scores]
    trials = trials_of(cells)
    shared = (
        " Arrows count each text once; the effective number of trials of an interval lies between "
        "texts and trials."
        if any(c.groups for c in cells)
        else ""
    )
    if len(tasks) == 1:
        return f"{trials} a cell.{shared}"
    titles = ", ".join(outcomes.task(task) for task in tasks)
    return (
        f"Unweighted mean over {titles}; {trials} of each.{shared} Differences are tested on one "
        "score per text, its mean over the tasks with equally many texts."
    )


def trials_of(cells: Sequence[Cell]) -> str:
    """Return ``256 trials``, ``2 to 4 trials`` or ``2,816 trials on 256 texts``."""
    trials = _range((len(cell.scores) for cell in cells), "trial")
    texts = f" on {_range((cell.texts for cell in cells), 'text')}"
    return trials + (texts if any(cell.groups for cell in cells) else "")


def _range(counts: Iterable[int], noun: str) -> str:
    least, *more = sorted({*counts})
    return f"{least:,} to {counted(more[-1], noun)}" if more else counted(least, noun)


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


WIDTH = 100
_CELL = len("131072 tokens")
_NAME = 19

CSV_HEAD = (
    *("model", "method", "task", "length", "factor", "n"),
    *("score", "low", "high", "p_value", "loss", "seconds"),
)


def terminal_tables(report: Report, width: int = WIDTH) -> RenderableType:
    """Return every table but the details, at most ``width`` characters wide.

    A table with more lengths than fit (four in 80 characters) continues below. A legend stands
    below the last of the tables that share it.
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


def markdown_tables(report: Report) -> str:
    """Return every table as Markdown under a heading; ends with a newline."""
    return "\n".join(_markdown(table) for table in tables(report)) or f"{UNMEASURED}\n"


def csv_table(report: Report) -> str:
    """Return CSV with one row for each cell, with numbers in full; empty if not measured.

    ``n`` counts what is independent: the texts of the trials, or the windows of a loss. ``score``,
    ``low`` and ``high`` are fractions. ``p_value`` belongs to the exact sign test against the row's
    reference. ``loss`` is in nats per token.
    """
    outcomes, rows = Outcomes(report), []
    for cell in report.cells:
        row = (cell.model, cell.method)
        rate = outcomes.estimate(row, [cell.task], cell.length) if cell.scores else None
        comparison = outcomes.comparison(row, [cell.task], cell.length) if cell.scores else None
        rows.append(
            (
                *(cell.model, cell.method, cell.task, cell.length, cell.factor),
                cell.texts or len(cell.by_window) or "",
                *((rate.mean, rate.low, rate.high) if rate else ("", "", "")),
                comparison.p_value if comparison else "",
                cell.last_loss,
                cell.seconds,
            )
        )
    return csv_text(CSV_HEAD, rows)


def terminal_table(title: str) -> RichTable:
    """Return a table for the terminal without columns."""
    return RichTable(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _terminal(table: Table, start: int, count: int) -> RichTable:
    chosen = slice(start, start + count)
    drawn = terminal_table(table.title + (" (continued)" if start else ""))
    drawn.add_column("\nmodel", overflow="fold", width=_NAME)
    for head in table.columns[chosen]:
        drawn.add_column(Text("\n".join(head)), justify="right", width=_CELL, overflow="fold")
    before = None
    followers = [*table.rows[1:], None]
    for (model, method, entries), following in zip(table.rows, followers, strict=True):
        name = row_name(model, method, first=model != before)
        # Methods are indented below their model's name.
        indent = ("", "") if model != before else ("  ", "    ")
        shown = wrap(name, _NAME, initial_indent=indent[0], subsequent_indent=indent[1])
        cells = [terminal_cell(entry) for entry in entries[chosen]]
        last = following is None or following[0] != model
        drawn.add_row(Text("\n".join(shown)), *cells, end_section=last)
        before = model
    return drawn


def terminal_cell(entry: Entry | None) -> Text:
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
    """Return a cell for Markdown, in one line."""
    if entry is None:
        return MISSING
    value = f"**{entry.value}**" if entry.best else entry.value
    interval = entry.interval and f"({entry.interval})"
    parts = (value, interval, entry.mark, entry.loss and f"/ {entry.loss}")
    return " ".join(part for part in parts if part)


def markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "–": "--",
    "\n": " ",
}


def latex_tables(report: Report) -> str:
    """Return a LaTeX ``table`` for each, labelled ``tab:<key>``; they need only booktabs."""
    made = [_latex_table(table) for table in tables(report)]
    return "\n".join(["% Needs \\usepackage{booktabs}.", *made]) if made else f"% {UNMEASURED}\n"


def escaped(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _latex_table(table: Table) -> str:
    count = len(table.columns)
    tops = (" & ".join(escaped(column[line]) for column in table.columns) for line in (0, 1))
    models = [
        "".join(
            f"{escaped(model) if i == 0 else ''} & {escaped(method)} & "
            f"{' & '.join(map(_latex_cell, entries))} \\\\\n"
            for i, (_, method, entries) in enumerate(rows)
        )
        for model, rows in groupby(table.rows, key=lambda row: row[0])
    ]
    return (
        "\\begin{table}\n\\centering\\footnotesize\\setlength{\\tabcolsep}{4pt}\n"
        f"\\caption{{{escaped(f'{table.title}. {table.note} {table.legend}')}}}\n"
        f"\\label{{tab:{re.sub('[^A-Za-z0-9-]+', '-', table.key)}}}\n"
        f"\\begin{{tabular}}{{ll{'r' * count}}}\n\\toprule\n"
        f" & & {next(tops)} \\\\\nmodel & method & {next(tops)} \\\\\n\\midrule\n"
        + "\\midrule\n".join(models)
        + "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
    )


def _latex_cell(entry: Entry | None) -> str:
    if entry is None:
        return escaped(MISSING)
    value = f"\\textbf{{{escaped(entry.value)}}}" if entry.best else escaped(entry.value)
    interval = f" {{\\scriptsize ({escaped(entry.interval)})}}" if entry.interval else ""
    mark = {"↑": "^{\\uparrow}", "↓": "^{\\downarrow}", UNCHANGED: "^{=}"}.get(entry.mark)
    loss = f" / {escaped(entry.loss)}" if entry.loss else ""
    return f"{value}{interval}{f'${mark}$' if mark else ''}{loss}"
