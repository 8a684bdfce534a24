"""The evaluation loop: a cell for each model, method, length and task.

Layouts come first: what is fitted on text is fitted before anything is measured. All models and
methods are measured on the same trials. A long cell is measured in parts. Each part
is stored when it is finished, so that an interrupted evaluation resumes. With several processes,
each takes every n-th part.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
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
from trainer.evaluation.store import Store, fingerprint
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
    layout: Layout
    task: Task
    parts: Sequence[dict[str, Any]]
    part_tokens: float


Layouts = dict[Method, dict[int, Layout]]
"""Layouts by method and length in tokens."""


def make_layouts(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[Method]],
    lengths: Sequence[int],
    text: FitText,
    store: Store,
    settings: Settings,
) -> tuple[Layouts, list[str]]:
    """Return the layouts of all methods, and a sentence for each value that was fitted on ``text``.

    This process makes those of every n-th method of a model, and waits for the others.

    ``methods``: those that apply to each model, by its name.
    """
    plain, layouts, sentences = adapter(list[Layout]), Layouts(), list[str]()
    for model in models:
        # The weights are read if anything is fitted.
        load = cache(partial(model.for_inference, settings.device, settings.dtype, PREFILL))
        keys = {
            method: {
                "model": model.fingerprint,
                "method": [method.key, method.settings, text.key],
                "lengths": lengths,
                "settings": settings.key,
            }
            for method in methods[model.name]
        }
        factors = [length / model.training_length for length in lengths]
        for method in [*keys][settings.rank :: settings.ranks]:
            if not store.has("fit", keys[method]):
                fitting = Fitting(load, text, settings.batch_tokens)
                made = list(map(method.layouts(fitting), factors))
                notes = list(dict.fromkeys(fitting.notes))
                store.put("fit", keys[method], {"layouts": plain.dump_python(made), "notes": notes})
                del fitting  # free the weights before the next model is read
        for method, key in keys.items():
            fitted = store.wait("fit", key)
            made = plain.validate_python(fitted["layouts"])
            layouts[method] = dict(zip(lengths, made, strict=True))
            sentences += [f"{model.name}, {method.title}: {note}" for note in fitted["notes"]]
    return layouts, sentences


def plan_cells(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[Method]],
    tasks: Sequence[Task],
    layouts: Layouts,
    settings: Settings,
) -> list[Cell]:
    """Return all cells, ordered by model, method, length and task.

    ``methods``: those that apply to each model, by its name.
    """
    cells = []
    for model in models:
        for method in methods[model.name]:
            for length, layout in layouts[method].items():
                flops = forward_flops(model.config, model.layout, length)
                inputs = {
                    "model": model.fingerprint,
                    "layout": fingerprint(layout),
                    "reads": method.reads,
                    "length": length,
                    "settings": settings.key,  # parts hold whole batches
                }
                for task in tasks:
                    sequences = task.sequences(length)
                    wanted = math.ceil(sequences * flops / PART[settings.device])
                    count = max(1, min(wanted, sequences))
                    key = {**inputs, "task": [*task.titles, task.fingerprint(length)]}
                    parts = [{**key, "part": [part, count]} for part in range(count)]
                    tokens = length * sequences / count
                    cells.append(Cell(model, method, length, layout, task, parts, tokens))
    return cells


def measure_cells(cells: Sequence[Cell], store: Store, settings: Settings) -> pd.DataFrame:
    """Measure what is not stored yet, and return the trials of all cells in :data:`COLUMNS`; no
    rows on all processes but the first."""
    parts = [(cell, number) for cell in cells for number in range(len(cell.parts))]
    missing = [cell for cell, number in parts if not store.has("part", cell.parts[number])]
    stored = len(parts) - len(missing)
    log.info("%d cells in %d parts, %d of these measured before", len(cells), len(parts), stored)
    total = sum(cell.part_tokens for cell in missing) / settings.ranks
    done = 0.0
    with Progress("Evaluating", max(total, 1.0)) as progress:
        progress.advance_to(0)
        for saved in dict.fromkeys(cell.model for cell in cells):
            # The weights are read if anything is missing.
            load = cache(partial(saved.for_inference, settings.device, settings.dtype, PREFILL))
            of_model = [(cell, number) for cell, number in parts if cell.model is saved]
            for cell, number in of_model[settings.rank :: settings.ranks]:
                if not store.has("part", cell.parts[number]):
                    value = _measure(cell, number, load(), settings.batch_tokens)
                    store.put("part", cell.parts[number], value)
                    done += cell.part_tokens
                    progress.advance_to(done)
    if settings.rank:
        return pd.DataFrame(columns=COLUMNS)
    return pd.concat([_trials(cell, store) for cell in cells], ignore_index=True)


def _measure(cell: Cell, number: int, model: LanguageModel, batch_tokens: int) -> dict[str, Any]:
    """Return the values of a part's trials, and the seconds that they took."""
    began, length = time.perf_counter(), cell.length
    reads, part = min(length, cell.method.reads or length), slice(number, None, len(cell.parts))
    with model.using(cell.layout):
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
