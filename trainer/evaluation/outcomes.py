"""The cells of a report by row and column, with estimates and comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell, Report, is_known
from trainer.evaluation.statistics import Comparison, Estimate, average, estimate, sign_test

AS_IS = "none"
AS_IS_TITLE = "as is"
"""The method that leaves a model as it was trained, and how tables call it."""

Row = tuple[str, str]
"""A model and the key of a method."""


@dataclass(frozen=True)
class Result:
    """What a row reached at one length: ``retrieval`` of the statements that training sequences
    carry, and ``loss`` on the last tokens; None where it was not measured. ``losses``: of every
    window, the same windows for all; empty where they are not known. ``name``: of the row."""

    name: str
    length: int
    factor: float
    retrieval: Estimate | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()


class Outcomes:
    """The cells of a report, found by row, task and length, with their statistics.

    ``rows``: models in the order of their first cells, methods in the report's. Every row but one
    has a reference: the same model as is or, for a model as is, the first model as is. Estimates
    and comparisons are None where the cells for them were not measured.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self._cells = {((c.model, c.method), c.task, c.length): c for c in report.cells}
        self._estimates: dict[tuple[Row, str, int], Estimate] = {}
        self.models = list(dict.fromkeys(cell.model for cell in report.cells))
        methods = list(dict.fromkeys((*report.methods, *(c.method for c in report.cells))))
        there = {row for row, _, _ in self._cells}
        self.rows = [(m, k) for m in self.models for k in methods if (m, k) in there]
        self.methods = [key for key in methods if any(key == method for _, method in self.rows)]

    @cached_property
    def scored(self) -> list[str]:
        """Keys of the tasks with scores, in the report's order."""
        there = dict.fromkeys(cell.task for cell in self.report.cells if cell.scores)
        return [key for key in dict.fromkeys((*self.report.tasks, *there)) if key in there]

    @cached_property
    def averaged(self) -> list[str]:
        """The most tasks with scores at the same lengths, so that a mean over them is one of the
        same tasks at every length; empty where there are not two of them."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for task in self.scored:
            alike.setdefault(tuple(self.lengths([task])), []).append(task)
        most = max(alike.values(), key=len, default=[])
        return most if len(most) > 1 else []

    def lengths(self, tasks: Iterable[str], losses: bool = False) -> dict[int, float]:
        """Length to factor, ascending, where any of the tasks has scores (or a last loss)."""
        wanted = set(tasks)
        found = (
            (cell.length, cell.factor)
            for cell in self.report.cells
            if cell.task in wanted and (cell.last_loss is not None if losses else cell.scores)
        )
        return dict(sorted(found))

    def cell(self, row: Row, task: str, length: int) -> Cell | None:
        """None where it was not measured."""
        return self._cells.get((row, task, length))

    def method(self, key: str) -> str:
        """A method's title."""
        return self.report.methods.get(key, key)

    def task(self, key: str) -> str:
        """A task's title."""
        return self.report.tasks.get(key, key)

    def name(self, row: Row) -> str:
        """``DroPE + YaRN``; a model as is has its name alone."""
        model, method = row
        return model if method == AS_IS else f"{model} + {self.method(method)}"

    def reference(self, row: Row) -> Row | None:
        """What a row is compared with."""
        model, method = row
        if method != AS_IS:
            return model, AS_IS
        return None if model == self.models[0] else (self.models[0], AS_IS)

    def estimate(self, row: Row, tasks: Sequence[str], length: int) -> Estimate | None:
        """The unweighted mean over the tasks."""
        found = [self._estimate(row, task, length) for task in tasks]
        known = [part for part in found if part is not None]
        return average(known) if known and len(known) == len(found) else None

    def comparison(
        self, row: Row, tasks: Sequence[str], length: int, label: tuple[int, str] | None = None
    ) -> Comparison | None:
        """With the reference, on the trials of all the tasks together; ``label``: on those alone
        that have that part of their label."""
        other = self.reference(row)
        if other is None:
            return None
        own: list[float] = []
        reference: list[float] = []
        for task in tasks:
            a, b = self.cell(row, task, length), self.cell(other, task, length)
            if a is None or b is None or len(a.scores) != len(b.scores):
                return None
            own += labelled(a, label)
            reference += labelled(b, label)
        return sign_test(own, reference) if own else None

    def results(self) -> list[Result]:
        """Retrieval and loss of every row at every length at which it has one of them."""
        lengths = {cell.length: cell.factor for cell in self.report.cells}
        found = []
        for row in self.rows:
            for length, factor in sorted(lengths.items()):
                cell = self.cell(row, PERPLEXITY, length)
                retrieval = self.estimate(row, [STATEMENTS], length)
                loss = None if cell is None else cell.last_loss
                losses = () if cell is None else tuple(x for x in cell.by_window if is_known(x))
                if retrieval is not None or loss is not None:
                    found.append(Result(self.name(row), length, factor, retrieval, loss, losses))
        return found

    def _estimate(self, row: Row, task: str, length: int) -> Estimate | None:
        cell = self.cell(row, task, length)
        if cell is None or not cell.scores:
            return None
        key = (row, task, length)
        if key not in self._estimates:
            self._estimates[key] = estimate(cell.scores)
        return self._estimates[key]


def row_name(model: str, method: str, *, first: bool) -> str:
    """A row in a table, by the titles of both; ``first``: of its model, which the others leave
    out."""
    if method == AS_IS_TITLE:
        return model
    return f"{model} + {method}" if first else f"+ {method}"


def parts(label: str) -> list[str]:
    """A label's parts: ``category|bucket`` has two."""
    return label.split("|")


def labelled(cell: Cell, label: tuple[int, str] | None) -> list[float]:
    """The scores of the trials with that part of their label; None: of all trials."""
    if label is None:
        return list(cell.scores)
    index, value = label
    pairs = zip(cell.scores, map(parts, cell.labels), strict=True) if cell.labels else ()
    return [score for score, found in pairs if len(found) > index and found[index] == value]


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts ``8–16K`` behind ``4–8K``: numbers by value, everything else as text."""
    return [(int(n), "") if n else (-1, word) for n, word in re.findall(r"(\d+)|(\D+)", text)]
