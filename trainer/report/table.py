"""The tables of a report, independent of the output format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trainer.report.outcomes import Outcomes, Row, labelled, natural, parts
from trainer.report.results import PERPLEXITY, Report
from trainer.report.statistics import Comparison, Estimate, average, estimate
from trainer.report.words import counted, factor_label, percent

MISSING = "·"


@dataclass(frozen=True)
class Entry:
    """What stands in a cell: ``97.3``, its interval ``92.4–99.1`` (may be empty), the mark ``↑`` or
    ``↓`` of a difference, whether it is the best of its column, and the loss beside it."""

    value: str
    interval: str = ""
    mark: str = ""
    best: bool = False
    loss: str = ""


@dataclass(frozen=True)
class Table:
    """``key`` names it in links. ``note``: what is particular to it; ``legend``: what its cells
    mean, mostly the same for all. ``columns``: two lines each. ``rows``: model, method and an entry
    for every column, None where nothing was measured. ``detail``: of less interest."""

    key: str
    title: str
    note: str
    legend: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, tuple[Entry | None, ...]], ...]
    detail: bool = False


def tables(report: Report) -> list[Table]:
    """The mean over tasks where there are several, a table for each task, both followed by averages
    by label where there are labels, and perplexity as the last.

    A task that is the only one has the held-out losses beside its scores, if both were measured at
    the same lengths; the table of perplexity is then a detail.
    """
    outcomes = Outcomes(report)
    made = []
    if outcomes.averaged:
        made.append(_scores(outcomes, "summary", "Mean over tasks", outcomes.averaged))
        made += _by_label(outcomes, "summary", "Mean over tasks", outcomes.averaged)
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    beside = len(outcomes.scored) == 1 and outcomes.lengths(outcomes.scored) == lengths
    for task in outcomes.scored:
        made.append(_scores(outcomes, task, outcomes.task(task), [task], with_losses=beside))
        made += _by_label(outcomes, task, outcomes.task(task), [task])
    return made + _perplexity(outcomes, detail=beside)


def heads(lengths: dict[int, float]) -> list[tuple[str, str]]:
    """Two lines for each length: ``2048 tokens`` and ``2×``."""
    return [
        (f"{length} tokens", f"{factor_label(factor)}{' (trained)' if factor == 1 else ''}")
        for length, factor in lengths.items()
    ]


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats per token; infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


def number(value: float) -> str:
    """A perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _scores(
    outcomes: Outcomes, key: str, title: str, tasks: list[str], with_losses: bool = False
) -> Table:
    lengths = outcomes.lengths(tasks)

    def column(length: int) -> dict[Row, Entry]:
        found = {row: outcomes.estimate(row, tasks, length) for row in outcomes.rows}
        entries = _column(found, lambda row: outcomes.comparison(row, tasks, length))
        if not with_losses:
            return entries
        losses = _losses(outcomes, length)
        return {
            row: replace(entry, loss=f"{losses[row]:.3f}" if row in losses else MISSING)
            for row, entry in entries.items()
        }

    what, legend = _what(outcomes, tasks), _legend(outcomes)
    if with_losses:
        legend = f"{legend} {_LOSSES.format(outcomes.report.last)}"
    columns = [column(length) for length in lengths]
    return _table(outcomes, key, title, what, legend, heads(lengths), columns)


_LOSSES = "Then the held-out loss in nats per token, on the last {} tokens of each window."


def _losses(outcomes: Outcomes, length: int) -> dict[Row, float]:
    cells = {row: outcomes.cell(row, PERPLEXITY, length) for row in outcomes.rows}
    return {row: c.last_loss for row, c in cells.items() if c and c.last_loss is not None}


def _by_label(outcomes: Outcomes, key: str, title: str, tasks: list[str]) -> list[Table]:
    """A table for every part of the labels that has more than one value, at every length.

    Of several tasks, the unweighted mean over those that have trials with a label.
    """
    made = []
    with_labels = [task for task in tasks if _labels(outcomes, [task])]
    if len(with_labels) < min(len(tasks), 2):
        return []
    tasks = with_labels
    for length, factor in outcomes.lengths(tasks).items():
        labels = _labels(outcomes, tasks, length)
        for index in range(max(map(len, labels), default=0)):
            values = sorted({label[index] for label in labels if len(label) > index}, key=natural)
            if len(values) < 2:
                continue
            columns, counts = zip(
                *(_label(outcomes, tasks, length, (index, value)) for value in values), strict=True
            )
            made.append(
                _table(
                    outcomes,
                    f"{key}-{length}-label-{index + 1}",
                    f"{title} by label",
                    f"At {length} tokens ({factor_label(factor)}).",
                    _legend(outcomes),
                    list(zip(values, counts, strict=True)),
                    list(columns),
                    detail=True,
                )
            )
    return made


def _labels(
    outcomes: Outcomes, tasks: list[str], length: int | None = None
) -> set[tuple[str, ...]]:
    """Of all trials, at all lengths or at one."""
    return {
        tuple(parts(label))
        for cell in outcomes.report.cells
        if cell.task in tasks and length in (None, cell.length)
        for label in cell.labels
    }


def _label(
    outcomes: Outcomes, tasks: list[str], length: int, label: tuple[int, str]
) -> tuple[dict[Row, Entry], str]:
    """A column, and of how many trials, or of how many tasks, it is the average."""
    found: dict[Row, Estimate | None] = {}
    most = 0
    for row in outcomes.rows:
        cells = [outcomes.cell(row, task, length) for task in tasks]
        scores = [own for cell in cells if cell and (own := labelled(cell, label))]
        found[row] = average([estimate(own) for own in scores]) if scores else None
        most = max(most, len(scores) if len(tasks) > 1 else sum(map(len, scores)))
    column = _column(found, lambda row: outcomes.comparison(row, tasks, length, label))
    return column, counted(most, "task" if len(tasks) > 1 else "trial")


def _perplexity(outcomes: Outcomes, detail: bool) -> list[Table]:
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    columns = []
    for length in lengths:
        losses = _losses(outcomes, length)
        least = min(losses.values())
        columns.append(
            {
                row: Entry(number(perplexity(loss)), best=loss == least)
                for row, loss in losses.items()
            }
        )
    note = (
        f"exp of the mean loss on the last {outcomes.report.last} tokens of held-out "
        "sequences, the same tokens at every length, so that more context only adds what lies "
        "before them."
    )
    legend = "Bold: the lowest of a column."
    title = outcomes.task(PERPLEXITY)
    if not columns:
        return []
    return [_table(outcomes, PERPLEXITY, title, note, legend, heads(lengths), columns, detail)]


def _column(
    found: dict[Row, Estimate | None], comparison: Callable[[Row], Comparison | None]
) -> dict[Row, Entry]:
    best = max((e.mean for e in found.values() if e is not None), default=0.0)
    column = {}
    for row, own in found.items():
        if own is not None:
            held = comparison(row)
            mark = "" if held is None else held.mark
            interval = f"{percent(own.low)}–{percent(own.high)}"
            column[row] = Entry(percent(own.mean), interval, mark, own.mean == best > 0)
    return column


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
    """Rows in which nothing was measured are left out."""
    rows = tuple(
        (row[0], outcomes.method(row[1]), tuple(column.get(row) for column in entries))
        for row in outcomes.rows
        if any(row in column for column in entries)
    )
    if any(None in cells for *_, cells in rows):
        legend += f" {MISSING} not measured."
    return Table(key, title, note, legend, tuple(columns), rows, detail)


def _what(outcomes: Outcomes, tasks: list[str]) -> str:
    """How many trials a cell has."""
    counts = {len(c.scores) for c in outcomes.report.cells if c.task in tasks and c.scores}
    trials = counted(max(counts), "trial")
    if len(counts) > 1:
        trials = f"{min(counts):,} to {trials}"
    if len(tasks) == 1:
        return f"{trials} a cell."
    titles = ", ".join(outcomes.task(task) for task in tasks)
    return (
        f"Unweighted mean over {titles}; {trials} of each. Differences are tested on the "
        "trials of all of them together."
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
