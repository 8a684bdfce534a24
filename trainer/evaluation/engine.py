"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. A long cell is measured in parts. Each part
is stored when it is finished, so that an interrupted evaluation resumes. With several processes,
each takes every n-th part.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.progress import Progress
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.methods import Method
from trainer.evaluation.results import TRIAL_COLUMNS
from trainer.evaluation.saved_model import Dtype, SavedModel, multiplied_in
from trainer.evaluation.store import Store
from trainer.evaluation.task import Task
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

PART = {"cpu": 2e10, "cuda": 3e15}
"""Operations of a part of a cell, by device: less than a second on a core, and seconds to half a
minute on a GPU. This bounds what an interruption loses."""
PREFILL = 32768
"""Tokens of a long sequence that are read at once."""
COLUMNS = [*TRIAL_COLUMNS, "seconds"]


@dataclass(frozen=True)
class Settings:
    """Settings that decide how models are computed and which parts this process takes.

    ``batch_tokens``: of a forward pass. ``device``: "cpu" or "cuda". ``dtype``: of the weights.
    ``rank``: this process among ``ranks`` that share the work.
    """

    batch_tokens: int = 4096
    device: str = "cpu"
    dtype: Dtype = "fp32"
    rank: int = 0
    ranks: int = 1

    @property
    def key(self) -> list[Any]:
        """All of it that a result depends on."""
        return [self.batch_tokens, self.device, multiplied_in(self.dtype, self.device)]


@dataclass(frozen=True, eq=False)
class Cell:
    """One model, method, length (in tokens) and task.

    ``parts``: all inputs of the result of each part. The number of parts does not depend on the
    number of processes, so that a resumed evaluation can use fewer or more. ``part_tokens``: number
    of tokens that are read for a part, about.
    """

    model: SavedModel
    method: Method
    length: int
    task: Task
    parts: Sequence[dict[str, Any]]
    part_tokens: float


def plan_cells(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[Method]],
    tasks: Sequence[Task],
    lengths: Sequence[int],
    text: FitText,
    settings: Settings,
) -> list[Cell]:
    """Return all cells, ordered by model, method, length (in tokens) and task.

    ``methods``: those that apply to each model, by its name; they are fitted on ``text``.
    """
    cells = []
    for model in models:
        for method in methods[model.name]:
            for length in lengths:
                flops = forward_flops(model.config, model.layout, length)
                for task in tasks:
                    key = {
                        "model": model.fingerprint,
                        "method": [method.key, method.settings, text.key if method.fits else None],
                        "task": [*task.titles, task.fingerprint(length)],
                        "length": length,
                        "settings": settings.key,  # parts hold whole batches
                    }
                    sequences = task.sequences(length)
                    wanted = math.ceil(sequences * flops / PART[settings.device])
                    count = max(1, min(wanted, sequences))
                    parts = [{**key, "part": [part, count]} for part in range(count)]
                    tokens = length * sequences / count
                    cells.append(Cell(model, method, length, task, parts, tokens))
    return cells


def measure_cells(
    cells: Sequence[Cell], text: FitText, store: Store, settings: Settings
) -> tuple[pd.DataFrame, list[str]]:
    """Measure what is not stored yet.

    Returns:
        The trials of all cells in :data:`COLUMNS`, and a sentence for each fitted parameter; both
        are empty on all processes but the first.
    """
    parts = [(cell, number) for cell in cells for number in range(len(cell.parts))]
    missing = [cell for cell, number in parts if not store.has("part", cell.parts[number])]
    stored = len(parts) - len(missing)
    log.info("%d cells in %d parts, %d of these measured before", len(cells), len(parts), stored)
    total = sum(cell.part_tokens for cell in missing) / settings.ranks
    done, notes = 0.0, list[str]()
    with Progress("Evaluating", max(total, 1.0)) as progress:
        progress.advance_to(0)
        for saved in dict.fromkeys(cell.model for cell in cells):
            # The weights are read if anything is missing.
            load = cache(partial(saved.for_inference, settings.device, settings.dtype, PREFILL))
            of_model = [(cell, number) for cell, number in parts if cell.model is saved]
            layouts, fitted = _layouts([cell for cell, _ in of_model], load, text, store, settings)
            notes += fitted
            for cell, number in of_model[settings.rank :: settings.ranks]:
                if not store.has("part", cell.parts[number]):
                    layout = layouts[cell.method, cell.length]
                    value = _measure(cell, number, load(), layout, settings.batch_tokens)
                    store.put("part", cell.parts[number], value)
                    done += cell.part_tokens
                    progress.advance_to(done)
    if settings.rank:
        return pd.DataFrame(columns=COLUMNS), []
    return pd.concat([_trials(cell, store) for cell in cells], ignore_index=True), notes


def _measure(
    cell: Cell, number: int, model: LanguageModel, layout: Layout, batch_tokens: int
) -> dict[str, Any]:
    """Return the values of a part's trials, and the seconds that they took."""
    began, length = time.perf_counter(), cell.length
    reads, part = min(length, cell.method.reads or length), slice(number, None, len(cell.parts))
    with model.using(layout):
        values = cell.task.read(model, length, reads, batch_tokens, part)
    return {"values": values, "seconds": time.perf_counter() - began}


def _trials(cell: Cell, store: Store) -> pd.DataFrame:
    """Return the trials of each of the task's results, as soon as all parts are stored."""
    parts = [store.wait("part", key) for key in cell.parts]
    values = [value for part in parts for value in part["values"]]
    trials = cell.task.trials(cell.length).assign(
        model=cell.model.name,
        method=cell.method.key,
        metric=cell.task.metric,
        length=cell.length,
        factor=cell.length / cell.model.training_length,
        seconds=round(sum(part["seconds"] for part in parts), 3),
    )
    results = [
        trials.assign(task=key, value=pd.Series({n: x for n, name, x in values if name == key}))
        for key in cell.task.titles
    ]
    return pd.concat(results)[COLUMNS]


def _layouts(
    cells: Sequence[Cell],
    load: Callable[[], LanguageModel],
    text: FitText,
    store: Store,
    settings: Settings,
) -> tuple[dict[tuple[Method, int], Layout], list[str]]:
    """Return the layouts of one model by method and length, and a sentence for each fitted value.

    This process makes those of every n-th method, and waits for the others.
    """
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    saved, plain = cells[0].model, adapter(list[Layout])
    keys = {
        method: {
            "model": saved.fingerprint,
            "method": [method.key, method.settings, text.key],
            "lengths": lengths,
            "settings": settings.key,
        }
        for method in methods
    }
    for method in methods[settings.rank :: settings.ranks]:
        if not store.has("fit", keys[method]):
            fitting = Fitting(load, text, settings.batch_tokens)
            layout_at = method.layouts(fitting)
            made = [layout_at(length / saved.training_length) for length in lengths]
            notes = list(dict.fromkeys(fitting.notes))
            value = {"layouts": plain.dump_python(made), "notes": notes}
            store.put("fit", keys[method], value)
    layouts: dict[tuple[Method, int], Layout] = {}
    sentences: list[str] = []
    for method in methods:
        fitted = store.wait("fit", keys[method])
        for length, layout in zip(lengths, plain.validate_python(fitted["layouts"]), strict=True):
            layouts[method, length] = layout
        sentences += [f"{saved.name}, {method.title}: {note}" for note in fitted["notes"]]
    return layouts, sentences
