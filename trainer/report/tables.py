"""Tables of results: a row for each model and method, a column for each length."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from trainer.common.errors import UserError
from trainer.config import PERPLEXITY
from trainer.evaluation.results import (
    AS_IS,
    FACTS,
    MEAN,
    Report,
    Row,
    averaged,
    by_text,
    counted,
    factor_label,
    lengths_of,
    percent,
    read_csv,
)
from trainer.evaluation.statistics import ROUNDING, sign_mark

MISSING = "·"
TABLE = "results.csv"


class Cell(NamedTuple):
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
    """A table for the page and the terminal.

    ``note``: remarks on this table. ``legend``: meaning of the cells. ``columns``: two lines each.
    ``rows``: whether it is the first row of its model, its name, and a cell for every column, None
    if not measured.
    """

    title: str
    note: str
    legend: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[bool, str, tuple[Cell | None, ...]], ...]


def tables(report: Report) -> list[Table]:
    """Return the mean over tasks if there are several, a table for each task, and perplexity.

    A single task has the held-out losses beside its scores if both were measured at the same
    lengths, and then no table of perplexities follows.
    """
    rows = report.rows.dropna(subset="value")
    losses = rows[(rows.task == PERPLEXITY) & (rows.metric == "loss")]
    scores = {task: rows[(rows.task == task) & (rows.metric == "score")] for task in report.scored}
    beside = len(scores) == 1 and all({*s.length} == {*losses.length} for s in scores.values())
    shown = losses if beside else losses[:0]
    made = [_scores(report, task, of_task, shown) for task, of_task in scores.items()]
    return made + ([] if beside or losses.empty else [_perplexities(report, losses)])


def compare(runs: Sequence[str]) -> list[Table]:
    """Return a table for each task and metric with the rows of several runs, which are named by
    their directories. Losses on different texts or tokens stand in different tables.

    ``runs``: directories that hold ``results.csv``, or whose ``evaluation`` does.

    Raises:
        UserError: a run has no results.
    """
    names = [Path(run).resolve().name for run in runs]
    names = names if len({*names}) == len(names) else list(runs)
    named = zip(names, map(_results, runs), strict=True)
    rows = pd.concat([rows.assign(model=f"{name}: " + rows.model) for name, rows in named])

    def cell(row: Any) -> Cell:
        show = percent if row.metric == "score" else "{:.3f}".format
        limits = "" if pd.isna(row.low) else f"{show(row.low)}–{show(row.high)}"
        return Cell(show(row.value), limits)

    groups = rows.dropna(subset="value").groupby(["task", "metric", "text"], sort=False)
    return [
        _table(f"{task}, {metric}", "", "With 95% intervals.", of_task, cell)
        for (task, metric, _), of_task in groups
    ]


def _results(run: str) -> pd.DataFrame:
    """Read the result table of a run, or of its evaluation."""
    for path in (Path(run, TABLE), Path(run, "evaluation", TABLE)):
        if path.is_file() and len(rows := read_csv(path)):
            facts = json.loads(path.with_name(FACTS).read_bytes())
            text = facts["environment"]["corpus"]
            return rows.assign(text=rows.metric.map({"loss": text}).fillna(""))
    raise UserError(f"runs: expected directories with rows in {TABLE}, got {run!r}")


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token, or infinity if it overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def interval(low: float, high: float) -> str:
    """Return ``92.4–99.1``, the interval of a rate in percent."""
    return f"{percent(low)}–{percent(high)}"


def _trials(report: Report, task: str) -> str:
    """Return ``256 trials``, ``2 to 4 trials`` or ``2,816 trials on 256 texts``."""
    trials = report.trials[(report.trials.task == task) & (report.trials.metric == "score")]
    cells = trials.groupby(["model", "method", "length"]).text.agg(["size", "nunique"])
    counts = {
        noun: f"{least:,} to {counted(most, noun)}" if least < most else counted(most, noun)
        for noun, least, most in zip(("trial", "text"), cells.min(), cells.max(), strict=True)
    }
    several = (cells["size"] != cells["nunique"]).any()
    return f"{counts['trial']} on {counts['text']}" if several else counts["trial"]


def _scores(report: Report, task: str, scores: pd.DataFrame, losses: pd.DataFrame) -> Table:
    """Return the table of a task's scores, with ``losses`` beside them."""
    beside = {((r.model, r.method), r.length): f"{r.value:.3f}" for r in losses.itertuples()}
    marks = _marks(report, task)
    highest = scores.groupby("length").value.max()

    def cell(row: Any) -> Cell:
        at = (row.model, row.method), row.length
        best = row.value > 0 and highest[row.length] - row.value <= ROUNDING
        loss = beside.get(at, MISSING * bool(beside))
        return Cell(percent(row.value), interval(row.low, row.high), marks.get(at, ""), best, loss)

    legend = "Success in %, with its 95% interval."
    if marks:
        legend += (
            " ↑ ↓ better or worse than the same model as it is, or as it is than the first model, "
            "on the same trials (exact sign test, p < 0.05, not corrected for the number of tests)."
        )
    legend += " Bold: the highest of a column."
    if beside:
        legend += f" Then the held-out loss in nats per token, on the last {report.last} tokens"
        legend += " of each window."
    note = (
        f"{_trials(report, task)} a cell."
        if task != MEAN
        else (
            "Unweighted mean. Differences are tested on one score per text, its mean over the "
            "tasks with equally many texts."
        )
    )
    title = report.tasks[task]
    return _table(title, note, legend, scores, cell, report.methods, report.trained)


def _marks(report: Report, task: str) -> dict[tuple[Row, int], str]:
    """Return ``↑``, ``↓`` or nothing by the sign test, for each row and length that is compared.

    A row is compared with the same model as is or, for a model as is, with the first model as is.
    """
    tasks = averaged(report.trials) if task == MEAN else [task]
    scores = by_text(report.trials, tasks).pivot(
        index=["length", "texts", "text"], columns=["model", "method"], values="value"
    )
    first = next(iter(report.rows.model), "")
    marks = {}
    for row in scores:
        reference = (row[0] if row[1] != AS_IS else first, AS_IS)
        if reference != row and reference in scores:
            pairs = scores[[row, reference]].dropna()
            for length, both in pairs.groupby("length"):
                marks[row, length] = sign_mark(both[row], both[reference])
    return marks


def _perplexities(report: Report, losses: pd.DataFrame) -> Table:
    by_length = losses.groupby("length").value
    lowest, among = by_length.min(), by_length.agg(["size", "nunique"])

    def cell(row: Any) -> Cell:
        size, different = among.loc[row.length]
        best = row.value == lowest[row.length] and (different > 1 or size == 1)
        return Cell(_number(perplexity(row.value)), best=best)

    note = (
        f"exp of the mean loss on the last {report.last} tokens of held-out sequences, "
        "the same at every length, so that more context only adds what lies before them."
    )
    title, legend = report.tasks[PERPLEXITY], "Bold: the lowest of a column."
    return _table(title, note, legend, losses, cell, report.methods, report.trained)


def _number(value: float) -> str:
    """Return a perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _table(
    title: str,
    note: str,
    legend: str,
    rows: pd.DataFrame,
    cell: Callable[[Any], Cell],
    methods: Mapping[str, str] | None = None,
    trained: int | None = None,
) -> Table:
    """Return the table of ``rows``, of one task and metric.

    ``cell``: shows a row. ``methods``: titles by key. ``trained``: the length to mark. The rows of
    a model after its first are named by their method alone.
    """
    lengths = lengths_of(rows)
    columns = tuple(
        (f"{length} tokens", factor_label(factor) + " (trained)" * (length == trained))
        for length, factor in lengths.items()
    )
    cells = {(row.model, row.method, row.length): cell(row) for row in rows.itertuples()}
    shown, before = [], None
    for model, method in dict.fromkeys(key[:2] for key in cells):
        added = "" if method == AS_IS else f"+ {(methods or {}).get(method, method)}"
        name = added if added and model == before else f"{model} {added}".rstrip()
        entries = tuple(cells.get((model, method, length)) for length in lengths)
        shown.append((model != before, name, entries))
        before = model
    if any(None in entries for *_, entries in shown):
        legend += f" {MISSING} not measured."
    return Table(title, note, legend, columns, tuple(shown))
