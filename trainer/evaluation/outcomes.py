"""The cells of a report by row and column, with estimates and comparisons, and as rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell, Report, is_known
from trainer.evaluation.statistics import (
    Comparison,
    EffectiveLength,
    Estimate,
    average,
    effective_length,
    estimate,
    mean_estimate,
    sign_test,
)

AS_IS = "none"
AS_IS_TITLE = "as is"
"""Key and title of the method that leaves a model as it was trained."""

Row = tuple[str, str]
"""Model name and method key."""


@dataclass(frozen=True)
class Result:
    """Retrieval and loss of a row at one length; None if not measured.

    ``name``: the row's name. ``retrieval``: score on the task of the training sequences, the mean
    of ``scores``. ``loss``: mean on the last tokens. ``losses``: this loss for each window, the
    same windows for all rows. ``scores``, ``losses``: empty if unknown, and independent.
    """

    name: str
    length: int
    factor: float
    retrieval: Estimate | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Independent scores, one for each text: means over its ``trials`` in a number of ``tasks``."""

    scores: tuple[float, ...]
    trials: int
    tasks: int = 1


class Outcomes:
    """Index of a report's cells by row, task and length, with their statistics.

    ``rows``: models in the order of their first cells, methods in the report's order. Every row
    but one has a reference: the same model as is or, for a model as is, the first model as is.
    Estimates and comparisons are None if their cells were not measured.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self._cells = {((c.model, c.method), c.task, c.length): c for c in report.cells}
        self.models = list(dict.fromkeys(cell.model for cell in report.cells))
        methods = list(dict.fromkeys((*report.methods, *(c.method for c in report.cells))))
        measured = {row for row, _, _ in self._cells}
        self.rows = [(m, k) for m in self.models for k in methods if (m, k) in measured]
        self.methods = [key for key in methods if any(key == method for _, method in self.rows)]
        self._cached_samples = cache(self._samples)

    @cached_property
    def scored(self) -> list[str]:
        """Keys of the tasks with scores, in the report's order."""
        scored = dict.fromkeys(cell.task for cell in self.report.cells if cell.scores)
        return [key for key in dict.fromkeys((*self.report.tasks, *scored)) if key in scored]

    @cached_property
    def averaged(self) -> list[str]:
        """Largest set of tasks with scores at the same lengths, or empty if it has fewer than two.

        A mean over them covers the same tasks at every length.
        """
        alike: dict[tuple[int, ...], list[str]] = {}
        for task in self.scored:
            alike.setdefault(tuple(self.lengths([task])), []).append(task)
        most = max(alike.values(), key=len, default=[])
        return most if len(most) > 1 else []

    def lengths(self, tasks: Iterable[str], losses: bool = False) -> dict[int, float]:
        """Return length to factor, ascending, if any of the tasks has scores (or a last loss)."""
        wanted = set(tasks)
        lengths = (
            (cell.length, cell.factor)
            for cell in self.report.cells
            if cell.task in wanted and (cell.last_loss is not None if losses else cell.scores)
        )
        return dict(sorted(lengths))

    def cell(self, row: Row, task: str, length: int) -> Cell | None:
        """Return a cell, or None if it was not measured."""
        return self._cells.get((row, task, length))

    def method(self, key: str) -> str:
        """Return a method's title."""
        return self.report.methods.get(key, key)

    def task(self, key: str) -> str:
        """Return a task's title."""
        return self.report.tasks.get(key, key)

    def name(self, row: Row) -> str:
        """Return a row's name, such as ``DroPE + YaRN``, or ``DroPE`` for the model as is."""
        model, method = row
        return model if method == AS_IS else f"{model} + {self.method(method)}"

    def reference(self, row: Row) -> Row | None:
        """Return the row with which a row is compared."""
        model, method = row
        if method != AS_IS:
            return model, AS_IS
        return None if model == self.models[0] else (self.models[0], AS_IS)

    def estimate(self, row: Row, tasks: Sequence[str], length: int) -> Estimate | None:
        """Return the unweighted mean over the tasks."""
        return _mean_of(self.samples(row, tasks, length))

    def samples(self, row: Row, tasks: Sequence[str], length: int) -> list[Sample]:
        """Return the independent scores of the tasks; empty unless all of them were measured.

        The score of a text is the mean over its trials. The n-th texts of tasks with the same
        numbers of texts may be the same one by design: all these tasks have a single sample with
        their means.
        """
        return self._cached_samples(row, tuple(tasks), length)

    def _samples(self, row: Row, tasks: tuple[str, ...], length: int) -> list[Sample]:
        cells = [cell for task in tasks if (cell := self.cell(row, task, length)) and cell.scores]
        return _samples_of(cells) if len(cells) == len(tasks) else []

    def effective_length(self, row: Row, tasks: Sequence[str]) -> EffectiveLength | None:
        """Return up to which length a row keeps its score at the training length."""
        scores = {length: self.estimate(row, tasks, length) for length in self.lengths(tasks)}
        chance = sum(map(self._chance, tasks)) / max(1, len(tasks))
        return effective_length(scores, self.report.training_length, chance)

    def _chance(self, task: str) -> float:
        """Return the score of naming any of several statements; 0 for tasks in words."""
        about = self.report.task if task == STATEMENTS else {}
        listed = float(about.get("chance_listed", 0.0))
        # One statement leaves nothing to choose: then only guessing its number is chance.
        return listed if listed < 1 else float(about.get("chance", 0.0))

    def comparison(self, row: Row, tasks: Sequence[str], length: int) -> Comparison | None:
        """Compare a row with its reference on the same texts (:meth:`samples`)."""
        other = self.reference(row)
        if other is None:
            return None
        pairs = [(self.cell(row, task, length), self.cell(other, task, length)) for task in tasks]
        if not all(
            a and b and len(a.scores) == len(b.scores) and a.groups == b.groups for a, b in pairs
        ):
            return None
        scores, reference = (
            [score for sample in self.samples(r, tasks, length) for score in sample.scores]
            for r in (row, other)
        )
        return sign_test(scores, reference) if scores else None

    def is_unchanged(self, row: Row, tasks: Iterable[str], length: int) -> bool:
        """Return whether the row's method leaves its model as it is at this length."""
        cells = [self.cell(row, task, length) for task in tasks]
        return any(cells) and all(cell is None or cell.unchanged for cell in cells)

    def results(self) -> list[Result]:
        """Return retrieval and loss of every row at each length that has either."""
        lengths = {cell.length: cell.factor for cell in self.report.cells}
        results = []
        for row in self.rows:
            for length, factor in sorted(lengths.items()):
                cell = self.cell(row, PERPLEXITY, length)
                retrieval = self.estimate(row, [STATEMENTS], length)
                loss = None if cell is None else cell.last_loss
                losses = () if cell is None else tuple(x for x in cell.by_window if is_known(x))
                if retrieval is not None or loss is not None:
                    results.append(Result(self.name(row), length, factor, retrieval, loss, losses))
        return results


def row_name(model: str, method: str, *, first: bool) -> str:
    """Return a row's name in a table; only the ``first`` row of a model repeats the model."""
    if method == AS_IS_TITLE:
        return model
    return f"{model} + {method}" if first else f"+ {method}"


def _samples_of(cells: Sequence[Cell]) -> list[Sample]:
    """Return one sample for all cells that have the same numbers of texts."""
    sets: dict[tuple[int, ...], list[dict[int, list[float]]]] = {}
    for cell in cells:
        texts: dict[int, list[float]] = defaultdict(list)
        numbers = cell.groups or range(len(cell.scores))
        for number, score in zip(numbers, cell.scores, strict=True):
            texts[number].append(score)
        sets.setdefault(tuple(texts), []).append(texts)
    return [
        Sample(
            tuple(_mean([_mean(texts[number]) for texts in alike]) for number in numbers),
            sum(len(scores) for texts in alike for scores in texts.values()),
            len(alike),
        )
        for numbers, alike in sets.items()
    ]


def _mean_of(samples: Sequence[Sample]) -> Estimate | None:
    """Return the unweighted mean over all tasks of the samples; None without any."""
    if not samples:
        return None
    return average([estimate(s.scores, s.trials) for s in samples], [s.tasks for s in samples])


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def rows(report: Report) -> list[dict[str, Any]]:
    """Return the report's cells as rows of results.csv.

    A score is the mean over texts. Trials with labels have a row for every label too, as the task
    ``TASK|LABEL``. The loss is the mean on the last tokens of the windows.
    """
    made = []
    evaluation = report.config.get("evaluation", report.config)
    seed = report.config.get("seed", evaluation.get("needles", {}).get("seed"))
    for cell in report.cells:
        about = {
            "run": report.name,
            **{key: getattr(cell, key) for key in ("model", "method", "length", "factor")},
            "seed": seed,
            "seconds": cell.seconds,
        }
        for task, part in _by_label(cell):
            (sample,) = _samples_of([part])
            value = estimate(sample.scores, sample.trials)
            made.append(_row(about, task, "score", value, len(sample.scores)))
        losses = [loss for loss in cell.by_window if is_known(loss)]
        if losses and cell.last_loss is not None:
            made.append(_row(about, cell.task, "loss", mean_estimate(losses), len(losses)))
    return made


def _row(about: dict[str, Any], task: str, metric: str, value: Estimate, n: int) -> dict[str, Any]:
    low, high = (x if math.isfinite(x) else None for x in (value.low, value.high))
    return {
        **about, "task": task, "metric": metric, "value": value.mean, "low": low, "high": high,
        "n": n,
    }  # fmt: skip


def _by_label(cell: Cell) -> list[tuple[str, Cell]]:
    """Return the cell, and a part of it for every part of its trials' labels; none without
    scores."""
    if not cell.scores:
        return []
    made = [(cell.task, cell)]
    places: dict[str, list[int]] = defaultdict(list)
    for place, label in enumerate(cell.labels):
        for part in label.split("|"):
            places[part].append(place)
    for part, chosen in places.items():
        scores = tuple(cell.scores[place] for place in chosen)
        groups = tuple(cell.groups[place] for place in chosen) if cell.groups else ()
        part_of_cell = replace(cell, scores=scores, groups=groups, depths=(), labels=())
        made.append((f"{cell.task}|{part}", part_of_cell))
    return made
