"""Tables of results: a row for each model and method, a column for each length."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    estimates,
    factor_label,
    lengths_of,
    percent,
    read_csv,
)
from trainer.evaluation.statistics import KEPT, ROUNDING, effective_length, sign_mark

MISSING = "·"
TABLE = "results.csv"
EFFECTIVE = "effective"
"""Column of effective lengths."""


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


Cells = dict[tuple[Row, int | str], Cell]
"""Cells by row and column: a length or :data:`EFFECTIVE`."""


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
    losses = _measured(report.rows, PERPLEXITY, "loss")
    scores = {task: _measured(report.rows, task, "score") for task in report.scored}
    beside = len(scores) == 1 and all({*s.length} == {*losses.length} for s in scores.values())
    made = [
        _scores(report, task, rows, losses[: beside * len(losses)]) for task, rows in scores.items()
    ]
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
    parts = [rows.assign(model=f"{name}: " + rows.model) for name, rows in named]
    made = []
    known = pd.concat(parts).dropna(subset="value")
    for (task, metric, _), rows in known.groupby(["task", "metric", "text"], sort=False):
        show = percent if metric == "score" else "{:.3f}".format
        cells: Cells = {
            ((row.model, row.method), row.length): Cell(
                show(row.value), "" if pd.isna(row.low) else f"{show(row.low)}–{show(row.high)}"
            )
            for row in rows.itertuples()
        }
        heads = _heads(lengths_of(rows))
        made.append(_table(f"{task}, {metric}", "", "With 95% intervals.", heads, cells, {}))
    return made


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


def trials_of(report: Report, task: str) -> str:
    """Return ``256 trials``, ``2 to 4 trials`` or ``2,816 trials on 256 texts``."""
    trials = report.trials[(report.trials.task == task) & (report.trials.metric == "score")]
    sizes = trials.groupby(["model", "method", "length"]).text.agg(["size", "nunique"])
    texts = f" on {_range(sizes['nunique'], 'text')}"
    return _range(sizes["size"], "trial") + texts * bool((sizes["size"] != sizes["nunique"]).any())


def _range(counts: Iterable[int], noun: str) -> str:
    least, *more = sorted({*counts})
    return f"{least:,} to {counted(more[-1], noun)}" if more else counted(least, noun)


def _measured(rows: pd.DataFrame, task: str, metric: str) -> pd.DataFrame:
    return rows[(rows.task == task) & (rows.metric == metric)].dropna(subset="value")


def _scores(report: Report, task: str, scores: pd.DataFrame, losses: pd.DataFrame) -> Table:
    """Return the table of a task's scores, with ``losses`` beside them."""
    beside = {((r.model, r.method), r.length): f"{r.value:.3f}" for r in losses.itertuples()}
    marks = _marks(report, task)
    highest = scores.groupby("length").value.max()
    cells: Cells = {}
    for r in scores.itertuples():
        at = (r.model, r.method), r.length
        best = r.value > 0 and highest[r.length] - r.value <= ROUNDING
        loss = beside.get(at, MISSING * bool(beside))
        cells[at] = Cell(percent(r.value), interval(r.low, r.high), marks.get(at, ""), best, loss)
    lengths = lengths_of(scores)
    heads = _heads(lengths, report.trained)
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
    reached = {
        row: effective
        for row, of_row in estimates(scores, task).items()
        if (
            effective := effective_length(
                {n: of_row.get(n) for n in lengths}, report.training_length, report.chance(task)
            )
        )
    }
    if reached:
        heads[EFFECTIVE] = "effective", f"≥{KEPT:.0%} of 1×"
        longest = max(length for length, _ in reached.values())
        for row, (length, falls) in reached.items():
            text = f"{'' if falls else '≥'}{length}" if length else "none"
            cells[row, EFFECTIVE] = Cell(text, best=0 < length == longest)
        legend += (
            f" Effective: the longest length, in tokens, up to which the score is at least "
            f"{KEPT:.0%} of its value at the training length (≥: at every length measured; none: "
            "at the training length the score is at chance)."
        )
    note = (
        f"{trials_of(report, task)} a cell."
        if task != MEAN
        else (
            "Unweighted mean. Differences are tested on one score per text, its mean over the "
            "tasks with equally many texts."
        )
    )
    return _table(report.tasks[task], note, legend, heads, cells, report.methods)


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
    cells: Cells = {}
    for r in losses.itertuples():
        size, different = among.loc[r.length]
        best = r.value == lowest[r.length] and (different > 1 or size == 1)
        cells[(r.model, r.method), r.length] = Cell(_number(perplexity(r.value)), best=best)
    note = (
        f"exp of the mean loss on the last {report.last} tokens of held-out sequences, "
        "the same at every length, so that more context only adds what lies before them."
    )
    heads, legend = _heads(lengths_of(losses), report.trained), "Bold: the lowest of a column."
    return _table(report.tasks[PERPLEXITY], note, legend, heads, cells, report.methods)


def _number(value: float) -> str:
    """Return a perplexity with about four digits."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.0e}"


def _heads(
    lengths: Mapping[int, float], trained: int | None = None
) -> dict[int | str, tuple[str, str]]:
    """Return two lines for each length: ``2048 tokens`` and ``2×``."""
    return {
        length: (f"{length} tokens", factor_label(factor) + " (trained)" * (length == trained))
        for length, factor in lengths.items()
    }


def _table(
    title: str,
    note: str,
    legend: str,
    heads: Mapping[int | str, tuple[str, str]],
    cells: Cells,
    methods: Mapping[str, str],
) -> Table:
    """Return a table with the rows in which something was measured.

    ``methods``: titles by key. The rows of a model after its first are named by their method alone.
    """
    shown, before = [], None
    for model, method in dict.fromkeys(row for row, _ in cells):
        added = "" if method == AS_IS else f"+ {methods.get(method, method)}"
        name = added if added and model == before else f"{model} {added}".rstrip()
        entries = tuple(cells.get(((model, method), column)) for column in heads)
        shown.append((model != before, name, entries))
        before = model
    if any(None in entries for *_, entries in shown):
        legend += f" {MISSING} not measured."
    return Table(title, note, legend, tuple(heads.values()), tuple(shown))
