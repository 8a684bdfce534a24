"""Plan of an evaluation: a cell for each model, method, task and length, its key, and its jobs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.evaluation.fitting import FitText
from trainer.evaluation.measurements import Measurement
from trainer.evaluation.methods import CHOICE, Recipe
from trainer.evaluation.passes import WHOLE, Piece
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

PART = {"cpu": 2e10, "cuda": 3e15}
"""Operations of a part of a cell, by device: less than a second on a core, and seconds to half a
minute on a GPU. This bounds what an interruption loses, and the wait for the last part."""


@dataclass(frozen=True)
class Subject:
    """A model that is not in memory yet; ``load`` reads it directly onto the device.

    ``fingerprint`` changes with its weights and the precision of the computation. ``native``:
    whether this package's decoder computes it. ``device``: type of its device, "cpu" or "cuda".
    """

    name: str
    fingerprint: str
    config: ModelConfig
    layout: Layout
    load: Callable[[], LanguageModel]
    native: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class PlannedCell:
    """Model, method, task and length of a cell to measure. ``key``: all inputs of its result."""

    subject: Subject
    recipe: Recipe
    task: Measurement
    length: int
    key: dict[str, Any]

    @property
    def work(self) -> float:
        """Approximate operations to read every sequence once."""
        return self.task.sequences(self.length) * self.operations(self.length)

    @property
    def factor(self) -> float:
        """The length in training lengths."""
        return self.length / self.subject.layout.training_length

    @property
    def fits(self) -> dict[int, int]:
        """Numbers of sequences that a fit for this length reads, by their length."""
        C = self.subject.layout.training_length
        return {round(s * C): n for s, n in self.recipe.fits(self.factor).items()}

    @property
    def is_unchanged(self) -> bool:
        """Whether the method leaves the model as it is for sequences of this length.

        Changes for longer ones do not count, such as a temperature beyond C.
        """
        method = self.recipe.known_at(self.factor)
        if method is None or method.crops(self.length):
            return False
        changed, trained = method.layout_at(self.factor), self.subject.layout
        return changed.acting_at(self.length) == trained.acting_at(self.length)

    def operations(self, length: int) -> float:
        """Return the approximate operations to read one sequence."""
        return forward_flops(self.subject.config, self.subject.layout, length)

    @property
    def parts(self) -> int:
        """Number of parts of the cell. It is independent of the number of processes, so that a
        resumed evaluation can use fewer or more."""
        parts = math.ceil(self.work / PART.get(self.subject.device, PART["cuda"]))
        return max(1, min(parts, self.task.sequences(self.length)))


@dataclass(frozen=True)
class Job:
    """One unit of work: measure a part of a cell, or fit a method.

    ``plans``: all cells of one method on one model. ``plan``: the cell (None: fit the method for
    all cells). ``kind``, ``key``: name of the result in the store.
    """

    plans: tuple[PlannedCell, ...]
    plan: PlannedCell | None
    piece: Piece
    kind: str
    key: dict[str, Any]

    @property
    def method(self) -> tuple[Subject, Recipe]:
        """The model and its method."""
        return self.plans[0].subject, self.plans[0].recipe

    @property
    def work(self) -> float:
        """Approximate operations; a method is fitted once for each length."""
        if self.plan is not None:
            return self.plan.work / self.piece.count
        fits = {length: n for plan in self.plans for length, n in plan.fits.items()}
        return sum(n * self.plans[0].operations(length) for length, n in fits.items())


def plan_jobs(plans: Sequence[PlannedCell], batch_tokens: int) -> list[Job]:
    """Return the distinct jobs of all cells; a method is fitted before its cells are measured.

    The key of a part also contains what determines the batches.
    """
    jobs: dict[str, Job] = {}

    def add(job: Job) -> None:
        jobs.setdefault(f"{job.kind} {json.dumps(job.key, sort_keys=True, default=str)}", job)

    for method in by_method(plans):
        if any(plan.fits for plan in method):
            add(Job(method, None, WHOLE, "choice", choice_key(method)))
        for plan in method:
            for job in cell_jobs(method, plan, batch_tokens):
                add(job)
    return list(jobs.values())


def cell_jobs(method: tuple[PlannedCell, ...], plan: PlannedCell, batch_tokens: int) -> list[Job]:
    """Return the jobs of one cell: one, or one for each part."""
    count = plan.parts
    if count == 1:
        return [Job(method, plan, WHOLE, "cell", plan.key)]
    batches = {"batch_tokens": batch_tokens, "device": plan.subject.device, "groups": "whole"}
    return [
        Job(method, plan, Piece(i, count), "part", {**plan.key, **batches, "part": [i, count]})
        for i in range(count)
    ]


def total_work(plans: Sequence[PlannedCell]) -> float:
    """Return the approximate operations of all distinct cells and of the fits of their methods."""
    cells = {json.dumps(plan.key, sort_keys=True, default=str): plan.work for plan in plans}
    fits = [Job(method, None, WHOLE, "choice", {}).work for method in by_method(plans)]
    return sum(cells.values()) + sum(fits)


def by_method(plans: Sequence[PlannedCell]) -> list[tuple[PlannedCell, ...]]:
    """Return the cells of each method of each model."""
    methods: dict[tuple[str, Recipe], list[PlannedCell]] = defaultdict(list)
    for plan in plans:
        methods[plan.subject.name, plan.recipe].append(plan)
    return list(map(tuple, methods.values()))


def choice_key(method: Sequence[PlannedCell]) -> dict[str, Any]:
    """Return the key of a method's fitted parameters."""
    return {"cells": [plan.key for plan in method]}


def plan_cells(
    subjects: Sequence[Subject],
    recipes: dict[str, list[Recipe]],
    tasks: Sequence[Measurement],
    lengths: Sequence[int],
    text: FitText,
) -> list[PlannedCell]:
    """Return all cells, ordered by model, method, length (in tokens) and task.

    ``recipes``: the methods that apply to each model, by its name; they are fitted on ``text``.
    """

    def key(subject: Subject, recipe: Recipe, length: int, task: Measurement) -> dict[str, Any]:
        fits = recipe.fits(length / subject.layout.training_length)
        read = text.choice_key if CHOICE in recipe.settings else text.key
        method = [recipe.key, recipe.settings, read if fits else None]
        return {
            "model": subject.fingerprint,
            "method": AS_IS_KEY if _changes_nothing(subject, recipe, length) else method,
            "task": [task.key, task.fingerprint(length)],
            "length": length,
        }

    return [
        PlannedCell(subject, recipe, task, length, key(subject, recipe, length, task))
        for subject in subjects
        for recipe in recipes[subject.name]
        for length in lengths
        for task in tasks
    ]


AS_IS_KEY: list[Any] = ["none", {}, None]
"""Method in the key of a cell of an unchanged model."""


def _changes_nothing(subject: Subject, recipe: Recipe, length: int) -> bool:
    """Return whether a method without fitted parameters leaves the model unchanged at this length.

    Its cell then shares the key of the unchanged model's cell.
    """
    method = recipe.fixed
    if method is None or method.crops(length):
        return False
    return method.layout_at(length / subject.layout.training_length) == subject.layout
