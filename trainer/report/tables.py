"""The tables of a report, for pages and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple, TypeVar

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from trainer.common.words import counted, factor_label, percent
from trainer.config import PERPLEXITY
from trainer.evaluation.results import AS_IS, MEAN, Report, Row, estimates, lengths_of
from trainer.evaluation.rows import averaged, by_text
from trainer.evaluation.statistics import (
    KEPT,
    ROUNDING,
    Estimate,
    effective_length,
    sign_test,
)

MISSING = "·"
EFFECTIVE_LEGEND = (
    f"Effective: the longest length, in tokens, up to which the score is at least {KEPT:.0%} of "
    "its value at the training length (≥: at every length measured; none: at the training length "
    "the score is at chance)."
)
WIDTH = 100
_CELL = len("131072 tokens")
_NAME = 19
K = TypeVar("K", bound=Hashable)


class Entry(NamedTuple):
    """Content of a cell: a value such as ``97.3`` and what is shown with it.

    ``interval``: ``92.4–99.1``, may be empty. ``mark``: ``↑`` or ``↓`` if significant. ``best``:
    whether it is the best of its column. ``loss``: the loss beside it.
    """

    value: str
    interval: str = ""
    mark: str = ""
    best: bool = False
    loss: str = ""


class Table(NamedTuple):
    """Table of a report, independent of the output format.

    ``note``: remarks on this table. ``legend``: meaning of the cells. ``columns``: two lines each,
    for a length and last the effective length. ``rows``: whether it is the first row of its model,
    its name, and an entry for every column, None if not measured.
    """

    title: str
    note: str
    legend: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[bool, str, tuple[Entry | None, ...]], ...]


def tables(report: Report) -> list[Table]:
    """Return the mean over tasks if there are several, a table for each task, and perplexity.

    A single task has the held-out losses beside its scores if both were measured at the same
    lengths, and then no table of perplexities follows.
    """
    losses = estimates(report.rows, PERPLEXITY, "loss")
    lengths = lengths_of(report.rows[report.rows.metric == "loss"])
    beside = len(report.scored) == 1 and lengths == _lengths(report, report.scored[0])
    made = [_scores(report, task, losses if beside else {}) for task in report.scored]
    return made + ([_perplexities(report, losses, lengths)] if lengths and not beside else [])


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token, or infinity if it overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def highest(means: Mapping[K, float]) -> list[K]:
    """Return the keys of the highest mean; equal means may differ by rounding."""
    best = max(means.values(), default=0.0)
    return [key for key, mean in means.items() if best - mean <= ROUNDING]


def interval(rate: Estimate) -> str:
    """Return ``92.4–99.1``, the 95% interval of a rate in percent."""
    return f"{percent(rate.low)}–{percent(rate.high)}"


def trials_of(report: Report, task: str) -> str:
    """Return ``256 trials``, ``2 to 4 trials`` or ``2,816 trials on 256 texts``."""
    trials = report.trials[(report.trials.task == task) & (report.trials.metric == "score")]
    sizes = trials.groupby(["model", "method", "length"]).text.agg(["size", "nunique"])
    texts = f" on {_range(sizes['nunique'], 'text')}"
    return _range(sizes["size"], "trial") + texts * bool((sizes["size"] != sizes["nunique"]).any())


def _range(counts: Iterable[int], noun: str) -> str:
    least, *more = sorted({*counts})
    return f"{least:,} to {counted(more[-1], noun)}" if more else counted(least, noun)


def _lengths(report: Report, task: str) -> dict[int, float]:
    scores = report.rows[(report.rows.task == task) & (report.rows.metric == "score")]
    return lengths_of(scores)


def _scores(report: Report, task: str, losses: Mapping[Row, Mapping[int, Estimate]]) -> Table:
    """Return the table of a task's scores, with ``losses`` beside them."""
    scores, lengths = estimates(report.rows, task), _lengths(report, task)
    marks = _marks(report, task)
    legend = "Success in %, with its 95% interval."
    if marks is not None:
        legend += (
            " ↑ ↓ better or worse than the same model as it is, or as it is than the first model, "
            "on the same trials (exact sign test, p < 0.05, not corrected for the number of tests)."
        )
    legend += " Bold: the highest of a column."
    if losses:
        legend += f" Then the held-out loss in nats per token, on the last {report.last} tokens"
        legend += " of each window."
    columns: list[dict[Row, Entry]] = []
    for length in lengths:
        rates = {row: of_row[length] for row, of_row in scores.items() if length in of_row}
        best = highest({row: rate.mean for row, rate in rates.items()})
        columns.append({})
        for row, rate in rates.items():
            beside = losses.get(row, {}).get(length)
            columns[-1][row] = Entry(
                percent(rate.mean),
                interval(rate),
                (marks or {}).get((row, length), ""),
                row in best and rate.mean > 0,
                f"{beside.mean:.3f}" if beside else MISSING * bool(losses),
            )
    heads = _heads(report, lengths)
    C, chance = report.training_length, report.chance(task)
    reached = {
        row: effective
        for row, of_row in scores.items()
        if (effective := effective_length({n: of_row.get(n) for n in lengths}, C, chance))
    }
    if reached:
        longest = max(effective.length for effective in reached.values())
        heads.append(("effective", f"≥{KEPT:.0%} of 1×"))
        columns.append(
            {row: Entry(e.text, best=0 < e.length == longest) for row, e in reached.items()}
        )
        legend += f" {EFFECTIVE_LEGEND}"
    return _table(report, report.tasks[task], _note(report, task), legend, heads, columns)


def _marks(report: Report, task: str) -> dict[tuple[Row, int], str] | None:
    """Return ``↑`` or ``↓`` of each row and length by the sign test; None if nothing is compared.

    A row is compared with the same model as is or, for a model as is, with the first model as is.
    """
    tasks = averaged(report.trials) if task == MEAN else [task]
    texts = by_text(report.trials, tasks)
    cells = {
        ((model, method), length): part.set_index(["texts", "text"]).value
        for (model, method, length), part in texts.groupby(
            ["model", "method", "length"], sort=False
        )
    }
    first = next(iter(report.rows.model), "")
    marks: dict[tuple[Row, int], str] = {}
    for ((model, method), length), scores in cells.items():
        reference = cells.get(((model if method != AS_IS else first, AS_IS), length))
        if reference is not None and reference is not scores and len(reference) == len(scores):
            paired = pd.concat([scores, reference], axis=1, join="inner")
            mark = sign_test(paired.iloc[:, 0].tolist(), paired.iloc[:, 1].tolist()).mark
            marks[(model, method), length] = mark
    return marks or None


def _note(report: Report, task: str) -> str:
    """Return the number of trials in a cell, and which of them are independent, as text."""
    if task != MEAN:
        return f"{trials_of(report, task)} a cell."
    return (
        "Unweighted mean. Differences are tested on one score per text, its mean over the tasks "
        "with equally many texts."
    )


def _perplexities(
    report: Report,
    losses: Mapping[Row, Mapping[int, Estimate]],
    lengths: Mapping[int, float],
) -> Table:
    columns = []
    for length in lengths:
        known = {row: of_row[length].mean for row, of_row in losses.items() if length in of_row}
        least = min(known.values()) if len({*known.values()}) > 1 or len(known) == 1 else None
        columns.append(
            {row: Entry(_number(perplexity(x)), best=x == least) for row, x in known.items()}
        )
    note = (
        f"exp of the mean loss on the last {report.last} tokens of held-out sequences, "
        "the same at every length, so that more context only adds what lies before them."
    )
    heads, legend = _heads(report, lengths), "Bold: the lowest of a column."
    return _table(report, report.tasks[PERPLEXITY], note, legend, heads, columns)


def _number(value: float) -> str:
    """Return a perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _heads(report: Report, lengths: Mapping[int, float]) -> list[tuple[str, str]]:
    """Return two lines for each length: ``2048 tokens`` and ``2×``."""
    trained = {report.trained: " (trained)"}
    return [
        (f"{length} tokens", factor_label(factor) + trained.get(length, ""))
        for length, factor in lengths.items()
    ]


def _table(
    report: Report,
    title: str,
    note: str,
    legend: str,
    heads: Iterable[tuple[str, str]],
    columns: Sequence[Mapping[Row, Entry]],
) -> Table:
    """Return a table with the rows in which something was measured.

    The rows of a model after its first are named by their method alone.
    """
    order = dict.fromkeys(zip(report.rows.model, report.rows.method, strict=True))
    shown, before = [], None
    for row in order:
        if any(row in column for column in columns):
            is_first = row[0] != before
            name = report.row_name(row)
            name = name if is_first else name.removeprefix(f"{row[0]} ")
            shown.append((is_first, name, tuple(column.get(row) for column in columns)))
            before = row[0]
    if any(None in entries for *_, entries in shown):
        legend += f" {MISSING} not measured."
    return Table(title, note, legend, tuple(heads), tuple(shown))


def terminal_tables(shown: Sequence[Table], width: int = WIDTH) -> RenderableType:
    """Return tables at most ``width`` characters wide.

    A table with more lengths than fit continues below. A legend stands below the last of the tables
    that share it.
    """
    fitting = max(1, (width - _NAME) // (_CELL + 1))
    lines: list[RenderableType] = []
    for table, following in pairwise([*shown, None]):
        assert table is not None
        for start in range(0, len(table.columns), fitting):
            lines.append(_terminal(table, start, fitting))
        lines.append(Text(f"{table.note}\n", style="dim"))
        if following is None or following.legend != table.legend:
            lines.append(Text(f"{table.legend}\n", style="dim"))
    return Group(*lines)


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
    for number, (is_first, name, entries) in enumerate(table.rows):
        if is_first and number:
            drawn.add_section()
        # Methods are indented below their model's name.
        indent = ("", "") if is_first else ("  ", "    ")
        lines = wrap(name, _NAME, initial_indent=indent[0], subsequent_indent=indent[1])
        drawn.add_row(Text("\n".join(lines)), *map(_terminal_cell, entries[chosen]))
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
