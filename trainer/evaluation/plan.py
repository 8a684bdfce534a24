"""What an evaluation measures: a cell of every model, method, task and length, what each depends
on, and the jobs that measure it."""

from __future__ import annotations

import json
import math
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
"""Operations of a part of a cell, by device: less than a second on a core, some seconds to half a
minute on a GPU. An interruption costs no more than that, nor does waiting for the last part."""


@dataclass(frozen=True)
class Subject:
    """A model that is not in memory yet; ``load`` reads it straight onto the device.

    ``fingerprint`` changes whenever its weights do, or the precision in which it is computed.
    ``own``: whether our decoder computes it. ``device``: the type of device that it is loaded onto,
    "cpu" or "cuda".
    """

    name: str
    fingerprint: str
    config: ModelConfig
    layout: Layout
    load: Callable[[], LanguageModel]
    own: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class Plan:
    """One model with one method in one task at one length; ``key``: all that it depends on."""

    subject: Subject
    recipe: Recipe
    task: Measurement
    length: int
    key: dict[str, Any]

    @property
    def work(self) -> float:
        """Approximate operations of reading every sequence once."""
        return self.task.sequences(self.length) * self.of_one(self.length)

    @property
    def factor(self) -> float:
        """The length in training lengths."""
        return self.length / self.subject.layout.training_length

    @property
    def fits(self) -> dict[int, int]:
        """How many sequences, by their length, fitting the method for this length reads."""
        C = self.subject.layout.training_length
        return {round(s * C): n for s, n in self.recipe.fits(self.factor).items()}

    def of_one(self, length: int) -> float:
        """Approximate operations of reading one sequence."""
        return forward_flops(self.subject.config, self.subject.layout, length)

    @property
    def parts(self) -> int:
        """In how many parts the cell is measured; the same for any number of processes, so that
        parts can be shared out anew among fewer or more."""
        of_work = math.ceil(self.work / PART.get(self.subject.device, PART["cuda"]))
        return max(1, min(of_work, self.task.sequences(self.length)))


@dataclass(frozen=True)
class Job:
    """What a process does at a time: it measures a part of a cell, or lets a method choose.

    ``plans``: all cells of one method of one model. ``plan``: the cell (None: the method chooses
    what it fits for all of them). ``kind``, ``key``: under which the result is stored.
    """

    plans: tuple[Plan, ...]
    plan: Plan | None
    piece: Piece
    kind: str
    key: dict[str, Any]

    @property
    def method(self) -> tuple[Subject, Recipe]:
        """The model, and the method on it."""
        return self.plans[0].subject, self.plans[0].recipe

    @property
    def work(self) -> float:
        """Approximate operations."""
        return fit_work(self.plans) if self.plan is None else self.plan.work / self.piece.count


def fit_work(plans: Sequence[Plan]) -> float:
    """Return the operations of what one method reads to choose, once for each length."""
    fits = {length: n for plan in plans for length, n in plan.fits.items()}
    return sum(n * plans[0].of_one(length) for length, n in fits.items())


def plan_jobs(plans: Sequence[Plan], batch_tokens: int) -> list[Job]:
    """Return the jobs of all cells, each once; choices come before the cells of their method.

    A part's key has all that decides which sequences are read together.
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


def cell_jobs(method: tuple[Plan, ...], plan: Plan, batch_tokens: int) -> list[Job]:
    """Return the jobs of one cell, one or a part each."""
    count = plan.parts
    if count == 1:
        return [Job(method, plan, WHOLE, "cell", plan.key)]
    batches = {"batch_tokens": batch_tokens, "device": plan.subject.device}
    return [
        Job(method, plan, Piece(i, count), "part", {**plan.key, **batches, "part": [i, count]})
        for i in range(count)
    ]


def by_method(plans: Sequence[Plan]) -> list[tuple[Plan, ...]]:
    """Return the cells of each method of each model."""
    found: dict[tuple[str, Recipe], list[Plan]] = {}
    for plan in plans:
        found.setdefault((plan.subject.name, plan.recipe), []).append(plan)
    return [tuple(of_one) for of_one in found.values()]


def choice_key(method: Sequence[Plan]) -> dict[str, Any]:
    """Return the key of what a method chose."""
    return {"cells": [plan.key for plan in method]}


def plan_cells(
    subjects: Sequence[Subject],
    recipes: dict[str, list[Recipe]],
    tasks: Sequence[Measurement],
    lengths: Sequence[int],
    text: FitText,
) -> list[Plan]:
    """All cells, a model after the other, and of a model a method after the other.

    Args:
        subjects: the models.
        recipes: the methods that apply to each, by its name.
        tasks: what is measured.
        lengths: in tokens.
        text: what methods choose on.
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
        Plan(subject, recipe, task, length, key(subject, recipe, length, task))
        for subject in subjects
        for recipe in recipes[subject.name]
        for length in lengths
        for task in tasks
    ]


AS_IS_KEY: list[Any] = ["none", {}, None]
"""The method in the key of a cell of the model as it is."""


def _changes_nothing(subject: Subject, recipe: Recipe, length: int) -> bool:
    """Return whether a method that chooses nothing leaves the model as it is at this length. Its
    cell is then the same as that of the model as it is, and stored with it."""
    method = recipe.fixed
    if method is None or (method.reads is not None and method.reads < length):
        return False
    return method.layout_at(length / subject.layout.training_length) == subject.layout
