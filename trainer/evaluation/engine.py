"""The evaluation loop over cells of model, method, task and length, each stored when finished.

All models and methods are measured on the same trials. A long cell is measured in parts, each
stored as well; an interrupted evaluation resumes, and several processes share the parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trainer.common.progress import Progress
from trainer.common.words import counted
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.measurements import Reading
from trainer.evaluation.methods import Method, Recipe
from trainer.evaluation.outcomes import AS_IS
from trainer.evaluation.plan import (
    AS_IS_KEY,
    Job,
    PlannedCell,
    Subject,
    by_method,
    cell_jobs,
    choice_key,
    plan_jobs,
)
from trainer.evaluation.results import Cell
from trainer.evaluation.store import Claims, Share, Store
from trainer.model.language_model import LanguageModel

log = logging.getLogger(__name__)


@dataclass
class Measured:
    """Results of an evaluation.

    ``notes``: descriptions of the fitted parameters. ``temperature``: the fitted temperatures, by
    model name.
    """

    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure_cells(
    plans: Sequence[PlannedCell],
    text: FitText,
    store: Store,
    batch_tokens: int,
    share: Share = Share(),  # noqa: B008
) -> Measured:
    """Measure the cells that are not stored yet, and return all cells in the order of ``plans``.

    Several processes share the jobs; only the first one returns results.
    """
    claims = Claims(store.directory, share)
    jobs = plan_jobs(plans, batch_tokens)
    missing = [job for job in jobs if not _is_done(store, job)]
    stored = sum(store.has("cell", plan.key) for plan in plans)
    log.info("%s, %d measured before", counted(len(plans), "cell"), stored)
    total = sum(job.work for job in missing) / share.processes
    with Progress("Evaluating", max(total, 1.0), silent=share.index > 0) as progress:
        worker = _Worker(text, store, batch_tokens, claims, _Counter(progress))
        worker.work(missing)
        if share.index:
            return Measured()
        claims.wait_for_others()
        return worker.collect(plans)


@dataclass
class _Worker:
    """One process, which runs jobs with one model in memory at a time."""

    text: FitText
    store: Store
    batch_tokens: int
    claims: Claims
    counter: _Counter
    model: LanguageModel | None = None
    subject: Subject | None = None
    methods: dict[Recipe, tuple[Method, Fitting]] = field(default_factory=dict)

    def work(self, jobs: Sequence[Job]) -> None:
        """Run jobs that no other process has claimed, until none remains."""
        remaining = self._in_order(jobs)
        while remaining:
            waiting = []
            for job in remaining:
                if not self._is_ready(job):
                    waiting.append(job)
                elif self.claims.take(job.kind, job.key) and not _is_done(self.store, job):
                    self._do(job)
            if len(waiting) == len(remaining):  # another process is still fitting
                if waiting[0].method[1].fit_is_shared:
                    self._method(waiting[0].plans)
                if not self._is_ready(waiting[0]):
                    self.claims.pause()
            remaining = waiting
        self.claims.leave()

    def collect(self, plans: Sequence[PlannedCell]) -> Measured:
        """Return all cells and the notes of their fits from the store."""
        results = Measured()
        for method in by_method(plans):
            name, recipe = method[0].subject.name, method[0].recipe
            for plan in method:
                # Cells are stored by content, so a stored one may have another method's name.
                # Cells of earlier versions have no groups.
                cell = Cell.from_dict(self._cell(method, plan))
                unchanged = recipe.key != AS_IS and plan.is_unchanged
                results.cells.append(
                    replace(
                        cell,
                        model=name,
                        method=recipe.key,
                        unchanged=unchanged,
                        groups=plan.task.groups(plan.length),
                    )
                )
            if not any(plan.fits for plan in method):
                continue
            choice = self._choice(method)
            results.notes += [f"{name}, {recipe.title}: {note}" for note in choice["notes"]]
            if choice["temperature"] is not None and recipe.key == "temperature":
                results.temperature[name] = choice["temperature"]
        return results

    def _in_order(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs sorted by model.

        With several processes, fits come first, because cells wait for them. A model's longest
        jobs come first, so that all processes end at about the same time.
        """
        if self.claims.share.processes == 1:
            return list(jobs)
        models = list(dict.fromkeys(job.method[0].name for job in jobs))
        return sorted(
            jobs,
            key=lambda job: (job.plan is not None, models.index(job.method[0].name), -job.work),
        )

    def _is_ready(self, job: Job) -> bool:
        """Return whether the method of a job's cell has been fitted."""
        needs_fit = job.plan is not None and any(plan.fits for plan in job.plans)
        return not needs_fit or self.store.has("choice", choice_key(job.plans))

    def _do(self, job: Job) -> None:
        if job.plan is None:
            self._choice(job.plans)
        elif job.kind == "cell":
            self._cell(job.plans, job.plan)
        else:
            self._part(job)
            parts = cell_jobs(job.plans, job.plan, self.batch_tokens)
            is_complete = all(self.store.has(part.kind, part.key) for part in parts)
            # Claim it: several processes may see the last part finish.
            if is_complete and self.claims.take("whole", job.plan.key):
                self._cell(job.plans, job.plan)

    def _choice(self, plans: tuple[PlannedCell, ...]) -> dict[str, Any]:
        """Return the notes of a method's fit and its temperature; fit it if they are not stored."""

        def fit() -> dict[str, Any]:
            method, fitting = self._method(plans)
            for plan in plans:
                method.layout_at(plan.factor)
            return {"notes": fitting.notes, "temperature": fitting.temperature}

        choice: dict[str, Any] = self.store.get("choice", choice_key(plans), fit)
        return choice

    def _cell(self, plans: tuple[PlannedCell, ...], plan: PlannedCell) -> dict[str, Any]:
        """Return a cell; if it is not stored, measure it or combine its parts."""
        jobs = cell_jobs(plans, plan, self.batch_tokens)
        make = partial(self._measured, plan, jobs)
        cell: dict[str, Any] = self.store.get("cell", plan.key, make)
        if len(jobs) > 1:
            for job in jobs:
                self.store.remove(job.kind, job.key)
        return cell

    def _measured(self, plan: PlannedCell, jobs: Sequence[Job]) -> dict[str, Any]:
        """Measure a cell in one or several parts, and return its stored form."""
        if len(jobs) == 1:
            method, fitting = self._method(jobs[0].plans)
            is_unchanged = method.layout_at(plan.factor) == fitting.model.layout
            as_is = {**plan.key, "method": AS_IS_KEY}
            if is_unchanged and not method.crops(plan.length) and self.store.has("cell", as_is):
                # The fitted method changes nothing at this length: take the unchanged cell.
                self.counter.add(plan, plan.length, plan.task.sequences(plan.length))
                as_is_cell: dict[str, Any] = self.store.get("cell", as_is, dict)
                return as_is_cell
        seconds = []

        def parts() -> Iterator[dict[str, Any]]:  # holds one part in memory at a time
            for job in jobs:
                part = self._part(job)
                seconds.append(part["seconds"])
                yield part

        fields = plan.task.cell(plan.length, parts())
        names = plan.subject.name, plan.recipe.key, plan.task.key
        total = round(sum(seconds), 3)
        return Cell(*names, plan.length, plan.factor, **fields, seconds=total).to_dict()

    def _part(self, job: Job) -> dict[str, Any]:
        """Return a part of a cell; measure it if it is not stored.

        The only part of a cell is not stored, since the cell itself is.
        """
        plan = job.plan
        assert plan is not None

        def measure() -> dict[str, Any]:
            method, fitting = self._method(job.plans)
            done = partial(self.counter.add, plan, plan.length)
            reads = method.reads if method.crops(plan.length) else None
            reading = Reading(fitting.model, plan.length, reads, self.batch_tokens, done, job.piece)
            began = time.perf_counter()
            with reading.model.using(method.layout_at(plan.factor)):
                results = plan.task.read(reading)
            return {**results, "seconds": time.perf_counter() - began}

        if job.kind == "cell":
            return measure()
        part: dict[str, Any] = self.store.get(job.kind, job.key, measure)
        return part

    def _method(self, plans: Sequence[PlannedCell]) -> tuple[Method, Fitting]:
        """Return a method on its model; load the model if another one is in memory."""
        subject, recipe = plans[0].subject, plans[0].recipe
        model = self._loaded(subject)
        if recipe not in self.methods:
            fitting = Fitting(
                model,
                subject.fingerprint,
                self.text,
                self.store,
                self.batch_tokens,
                lambda sequences, length: self.counter.add(plans[0], length, sequences),
                claims=self.claims,
            )
            self.methods[recipe] = recipe.make(fitting), fitting
        return self.methods[recipe]

    def _loaded(self, subject: Subject) -> LanguageModel:
        """Return a model. If another one is in memory, free it and load this one."""
        if self.subject is not subject or self.model is None:
            self.model = None
            self.methods.clear()
            self.model, self.subject = subject.load().eval(), subject
        return self.model


def _is_done(store: Store, job: Job) -> bool:
    """Return whether the result of a job, or its whole cell, is stored."""
    if job.plan is not None and store.has("cell", job.plan.key):
        return True
    return job.kind != "cell" and store.has(job.kind, job.key)


class _Counter:
    """Count of operations and tokens for the progress bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.work, self.tokens = progress, 0.0, 0
        progress.advance_to(0)

    def add(self, plan: PlannedCell, length: int, sequences: int) -> None:
        """Count sequences of ``length`` tokens that the model of ``plan`` has read."""
        self.work += sequences * plan.operations(length)
        self.tokens += sequences * length
        self.progress.advance_to(self.work, tokens=self.tokens)
