"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. A long cell is measured in parts. Each part
is stored when it is finished, so that an interrupted evaluation resumes. With several processes,
each takes every n-th part.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pandas as pd

from trainer.common.progress import Progress
from trainer.common.words import counted
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.measurements import Measurement, Reading
from trainer.evaluation.methods import CHOICE, Method, Recipe
from trainer.evaluation.passes import Piece
from trainer.evaluation.results import TRIAL_COLUMNS, table
from trainer.evaluation.rows import rows_of, trials_of
from trainer.evaluation.store import Store
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

PART = {"cpu": 2e10, "cuda": 3e15}
"""Operations of a part of a cell, by device: less than a second on a core, and seconds to half a
minute on a GPU. This bounds what an interruption loses."""


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
    def factor(self) -> float:
        """The length in training lengths."""
        return self.length / self.subject.layout.training_length

    @property
    def needs_fit(self) -> bool:
        """Whether the method reads held-out text for this length."""
        return bool(self.recipe.fits(self.factor))

    @cached_property
    def parts(self) -> list[tuple[Piece, dict[str, Any]]]:
        """Parts of the cell with the keys of their results.

        Their number is independent of the number of processes, so that a resumed evaluation can use
        fewer or more.
        """
        sequences, device = self.task.sequences(self.length), self.subject.device
        work = sequences * forward_flops(self.subject.config, self.subject.layout, self.length)
        count = max(1, min(math.ceil(work / PART.get(device, PART["cuda"])), sequences))
        return [(Piece(i, count), {**self.key, "part": [i, count]}) for i in range(count)]


def plan_cells(
    subjects: Sequence[Subject],
    recipes: dict[str, list[Recipe]],
    tasks: Sequence[Measurement],
    lengths: Sequence[int],
    text: FitText,
    batch_tokens: int,
) -> list[PlannedCell]:
    """Return all cells, ordered by model, method, length (in tokens) and task.

    ``recipes``: the methods that apply to each model, by its name; they are fitted on ``text``.
    """

    def key(subject: Subject, recipe: Recipe, length: int, task: Measurement) -> dict[str, Any]:
        fits = recipe.fits(length / subject.layout.training_length)
        read = text.choice_key if CHOICE in recipe.settings else text.key
        return {
            "model": subject.fingerprint,
            "method": [recipe.key, recipe.settings, read if fits else None],
            "task": task.fingerprint(length),
            "length": length,
            "batches": [batch_tokens, subject.device],  # parts hold whole batches
        }

    return [
        PlannedCell(subject, recipe, task, length, key(subject, recipe, length, task))
        for subject in subjects
        for recipe in recipes[subject.name]
        for length in lengths
        for task in tasks
    ]


@dataclass
class Measured:
    """Results of an evaluation.

    ``rows``: values of columns of results.csv, all but run and seed. ``trials``: see
    :data:`~trainer.evaluation.results.TRIAL_COLUMNS`. ``notes``: descriptions of the fitted
    parameters. ``temperature``: coefficients of fitted temperatures, by model name.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    trials: pd.DataFrame = field(default_factory=lambda: table([], TRIAL_COLUMNS))
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, float] = field(default_factory=dict)


def measure_cells(
    plans: Sequence[PlannedCell],
    text: FitText,
    store: Store,
    batch_tokens: int,
    rank: int = 0,
    ranks: int = 1,
) -> Measured:
    """Measure what is not stored yet, and return all results in the order of ``plans``.

    Processes ``rank`` of ``ranks`` share the work; only the first one returns results.
    """
    parts = {str(key): (plan, key) for plan in plans for _, key in plan.parts}
    missing = [plan for plan, key in parts.values() if not store.has("part", key)]
    log.info(
        "%s in %s, %d of these measured before",
        counted(len(plans), "cell"),
        counted(len(parts), "part"),
        len(parts) - len(missing),
    )
    by_subject: dict[str, list[PlannedCell]] = defaultdict(list)
    for plan in plans:
        by_subject[plan.subject.name].append(plan)
    fits: dict[tuple[str, str], Any] = {}
    total = sum(
        plan.length * plan.task.sequences(plan.length) / len(plan.parts) for plan in missing
    )
    with Progress("Evaluating", max(total / ranks, 1.0), silent=rank > 0) as progress:
        done = _Done(progress)
        for of_subject in by_subject.values():
            fits |= _measure_model(of_subject, text, store, batch_tokens, (rank, ranks), done)
    if rank:
        return Measured()
    store.wait_for(("part", key) for _, key in parts.values())
    measured = Measured()
    trials = []
    for plan in plans:
        of_cell, rows = _cell(plan, store)
        trials.append(of_cell)
        measured.rows += rows
    measured.trials = pd.concat(trials, ignore_index=True)
    for (name, method), fit in fits.items():
        measured.notes += fit["notes"]
        if fit["temperature"] is not None and method == "temperature":
            measured.temperature[name] = fit["temperature"]
    return measured


class _Done:
    """Count of tokens for the progress bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.tokens = progress, 0
        progress.advance_to(0)

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.progress.advance_to(self.tokens, tokens=self.tokens)


def _measure_model(
    plans: Sequence[PlannedCell],
    text: FitText,
    store: Store,
    batch_tokens: int,
    share: tuple[int, int],
    done: _Done,
) -> dict[tuple[str, str], Any]:
    """Fit the methods of one model, then measure this process's part of its cells.

    Returns the notes and temperatures of fitted methods, by model and method.
    """
    rank, ranks = share
    subject = plans[0].subject
    loaded: list[LanguageModel] = []
    methods: dict[str, tuple[Method, Fitting]] = {}

    def method_of(recipe: Recipe) -> tuple[Method, Fitting]:
        if not loaded:
            loaded.append(subject.load().eval())
        if recipe.key not in methods:
            fitting = Fitting(loaded[0], subject.fingerprint, text, store, batch_tokens)
            methods[recipe.key] = recipe.make(fitting), fitting
        return methods[recipe.key]

    def fit(plans: Sequence[PlannedCell]) -> dict[str, Any]:
        method, fitting = method_of(plans[0].recipe)
        for plan in plans:
            method.layout_at(plan.factor)
        title = f"{subject.name}, {plans[0].recipe.title}"
        notes = [f"{title}: {note}" for note in dict.fromkeys(fitting.notes)]
        return {"notes": notes, "temperature": fitting.temperature}

    def measure(plan: PlannedCell, piece: Piece) -> dict[str, Any]:
        method, fitting = method_of(plan.recipe)
        reads = method.reads if method.reads and method.reads < plan.length else None
        count: Callable[[int], None] = lambda sequences: done.add(sequences * plan.length)  # noqa: E731
        reading = Reading(fitting.model, plan.length, reads, batch_tokens, count, piece)
        began = time.perf_counter()
        with fitting.model.using(method.layout_at(plan.factor)):
            result = plan.task.read(reading)
        return {**result, "seconds": time.perf_counter() - began}

    to_fit: dict[str, list[PlannedCell]] = defaultdict(list)
    for plan in plans:
        if plan.needs_fit:
            to_fit[plan.recipe.key].append(plan)
    keys = {name: {"cells": [cell.key for cell in cells]} for name, cells in to_fit.items()}
    for name in [*to_fit][rank::ranks]:
        store.get("fit", keys[name], partial(fit, to_fit[name]))
    store.wait_for(("fit", key) for key in keys.values())
    parts = {
        json.dumps(key, sort_keys=True, default=str): (plan, piece, key)
        for plan in plans
        for piece, key in plan.parts
    }
    for plan, piece, key in [*parts.values()][rank::ranks]:
        store.get("part", key, partial(measure, plan, piece))
    return {(subject.name, name): store.get("fit", key, dict) for name, key in keys.items()}


def _cell(plan: PlannedCell, store: Store) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Return trials and rows of a cell from its stored parts."""
    parts = [store.get("part", key, dict) for _, key in plan.parts]
    about: dict[str, Any] = {
        "model": plan.subject.name,
        "method": plan.recipe.key,
        "task": plan.task.key,
        "length": plan.length,
        "factor": plan.factor,
    }
    cell = plan.task.cell(plan.length, parts)
    trials = trials_of(about, cell, plan.task.groups(plan.length))
    seconds = round(sum(part["seconds"] for part in parts), 3)
    return trials, list(rows_of(trials, cell, {**about, "seconds": seconds}))
