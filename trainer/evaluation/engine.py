"""The evaluation loop over cells of model, method, task and length, each stored when finished.

All models and methods are measured on the same trials; an interrupted evaluation resumes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.common.progress import Progress
from trainer.common.words import counted
from trainer.evaluation.duration import say_duration
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.methods import Method
from trainer.evaluation.plan import Plan, Subject
from trainer.evaluation.results import Cell
from trainer.evaluation.sharing import Share, wait_for
from trainer.evaluation.store import Store
from trainer.model.language_model import LanguageModel

log = logging.getLogger(__name__)


@dataclass
class Measured:
    """``cells``; ``notes``: what was chosen, in words; ``temperature``: what was fitted for a model
    as it was trained, by its name."""

    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure_cells(
    plans: Sequence[Plan],
    text: FitText,
    store: Store,
    batch_tokens: int,
    share: Share = Share(),  # noqa: B008
) -> Measured:
    """Measure what is not in the store yet: of several processes each a share of the methods, and
    all but the first return nothing."""
    if share.processes > 1:
        # Of all, finished or not: what is finished changes while the processes begin, and they must
        # agree on who does what.
        groups = _groups(plans)
        own = [plan for group in share.of(groups, _work) for plan in group]
        _measured(own, text, store, batch_tokens, share.index)
        if share.index:
            return Measured()
        wait_for(lambda: sum(not _is_finished(store, group) for group in groups))
    return _measured(plans, text, store, batch_tokens)


def _groups(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The cells of each method of each model."""
    subjects = dict.fromkeys(plan.subject for plan in plans)
    return [g for s in subjects for g in _by_method([p for p in plans if p.subject is s])]


def _measured(
    plans: Sequence[Plan], text: FitText, store: Store, batch_tokens: int, process: int = 0
) -> Measured:
    missing = [plan for plan in plans if not store.has("cell", plan.key)]
    total = _work(missing)
    there = len(plans) - len(missing)
    log.info("%s, %d measured before", counted(len(plans), "cell"), there)
    results = Measured()
    with Progress("Evaluating", max(total, 1.0), silent=process > 0) as progress:
        counter = _Counter(progress)
        for subject in dict.fromkeys(plan.subject for plan in plans):
            own = [plan for plan in plans if plan.subject is subject]
            if _is_finished(store, own):
                for chosen in _by_method(own):
                    _add_finished(results, store, chosen)
            else:
                _measure(subject, own, text, store, batch_tokens, counter, total, results)
    return results


def _measure(
    subject: Subject,
    plans: Sequence[Plan],
    text: FitText,
    store: Store,
    batch_tokens: int,
    counter: _Counter,
    total: float,
    results: Measured,
) -> None:
    """All cells of one model, which is in memory no longer afterwards."""
    model = subject.load().eval()
    if counter.work == 0:
        say_duration(model, {plan.length for plan in plans}, total, batch_tokens)
    for chosen in _by_method(plans):
        if _is_finished(store, chosen):
            _add_finished(results, store, chosen)
            continue
        read = counter.of_fits(chosen)
        fitting = Fitting(model, subject.fingerprint, text, store, batch_tokens, read)
        method = chosen[0].recipe.make(fitting)
        for plan in chosen:  # or an evaluation that goes on would tell less of its choices
            method.layout_at(plan.factor)
        results.cells += [_cell(model, method, p, store, batch_tokens, counter) for p in chosen]
        _add_choice(results, store, chosen, fitting)


def _by_method(plans: Sequence[Plan]) -> list[list[Plan]]:
    recipes = dict.fromkeys(plan.recipe for plan in plans)
    return [[plan for plan in plans if plan.recipe is recipe] for recipe in recipes]


def _is_finished(store: Store, plans: Sequence[Plan]) -> bool:
    """Whether all cells of a model are there, and what was chosen for them."""
    return all(store.has("cell", plan.key) for plan in plans) and all(
        store.has("choice", _choice_key(chosen))
        for chosen in _by_method(plans)
        if any(plan.fits for plan in chosen)
    )


def _add_finished(results: Measured, store: Store, plans: Sequence[Plan]) -> None:
    """All cells of one method of one model, as they are stored."""
    results.cells += [_stored(store, plan) for plan in plans]
    _add_choice(results, store, plans, None)


def _add_choice(
    results: Measured, store: Store, plans: Sequence[Plan], fitting: Fitting | None
) -> None:
    """What was chosen for one method of one model, kept for when nothing is left to measure."""
    choice: dict[str, Any] = {"notes": [], "temperature": None}
    if fitting is not None:
        choice = {"notes": fitting.notes, "temperature": fitting.temperature}
    if any(plan.fits for plan in plans):
        made = choice
        choice = store.get("choice", _choice_key(plans), lambda: made)
    name, recipe = plans[0].subject.name, plans[0].recipe
    results.notes += [f"{name}, {recipe.title}: {one}" for one in choice["notes"]]
    if choice["temperature"] is not None and recipe.key == "temperature":
        results.temperature[name] = choice["temperature"]


def _choice_key(plans: Sequence[Plan]) -> dict[str, Any]:
    return {"cells": [plan.key for plan in plans]}


def _work(plans: Sequence[Plan]) -> float:
    """Of the cells, and of what each method reads of a length to fit, once for all of a model."""
    fits = {
        (plan.subject.name, plan.recipe, length): sequences * plan.of_one(length)
        for plan in plans
        for length, sequences in plan.fits.items()
    }
    return sum(plan.work for plan in plans) + sum(fits.values())


class _Counter:
    """Counts work for the progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.work, self.tokens = progress, 0.0, 0
        progress.advance_to(0)

    def of(self, plan: Plan) -> Callable[[int], None]:
        """A callback for the number of sequences read for a cell."""
        return lambda sequences: self._add(sequences, plan.length, plan)

    def of_fits(self, plans: Sequence[Plan]) -> Callable[[int, int], None]:
        """A callback for the number and length of the sequences read for a fit."""
        return lambda sequences, length: self._add(sequences, length, plans[0])

    def _add(self, sequences: int, length: int, plan: Plan) -> None:
        self.work += sequences * plan.of_one(length)
        self.tokens += sequences * length
        self.progress.advance_to(self.work, tokens=self.tokens)


def _stored(store: Store, plan: Plan) -> Cell:
    return _named(store.get("cell", plan.key, dict), plan)


def _named(value: dict[str, Any], plan: Plan) -> Cell:
    """A stored cell under today's names, which are no part of what was measured: another method
    that changes nothing at this length may have measured it."""
    return replace(Cell.from_dict(value), model=plan.subject.name, method=plan.recipe.key)


def _cell(
    model: LanguageModel,
    method: Method,
    plan: Plan,
    store: Store,
    batch_tokens: int,
    counter: _Counter,
) -> Cell:
    if store.has("cell", plan.key):
        return _stored(store, plan)
    trained, done = model.layout, counter.of(plan)
    factor = plan.factor
    layout = method.layout_at(factor)
    reads = method.reads if method.reads is not None and method.reads < plan.length else None

    def measured() -> dict[str, Any]:
        began = time.perf_counter()
        with model.using(layout):
            found = plan.task.measure(model, plan.length, reads, batch_tokens, done)
        seconds = round(time.perf_counter() - began, 3)
        names = (plan.subject.name, plan.recipe.key, plan.task.key)
        return Cell(*names, plan.length, factor, **found, seconds=seconds).to_dict()

    def of_the_model_as_it_is() -> dict[str, Any]:
        key = {**plan.key, "method": ["none", {}, None]}
        if store.has("cell", key):
            done(plan.task.sequences(plan.length))
        return store.get("cell", key, measured)

    same = layout == trained and reads is None
    value = store.get("cell", plan.key, of_the_model_as_it_is if same else measured)
    return _named(value, plan)
