"""The evaluation loop: a cell for each model, method, length and task.

Layouts come first: what is fitted on text is fitted before anything is measured. All models and
methods are measured on the same trials. The values of each batch of a cell are stored when it has
been read, so that an interrupted evaluation resumes. With several processes, each reads every n-th
batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.progress import Progress
from trainer.config import EvaluationConfig
from trainer.evaluation.fitting import FitText
from trainer.evaluation.methods import layout_settings, layouts_for, title_of, tokens_read
from trainer.evaluation.results import TRIAL_COLUMNS
from trainer.evaluation.saved_model import Dtype, SavedModel, matmul_precision
from trainer.evaluation.store import Store, fingerprint
from trainer.evaluation.task import Task
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Settings of the computation.

    ``batch_tokens``: of a forward pass. ``device``: "cpu" or "cuda". ``dtype``: of the weights.
    """

    batch_tokens: int = 4096
    device: str = "cpu"
    dtype: Dtype = "fp32"


@dataclass(frozen=True, eq=False)
class Cell:
    """One model, method and task at a length; ``key``: of its values, by all of their inputs."""

    model: SavedModel
    method: str
    layout: Layout
    task: Task
    key: str

    @property
    def tokens(self) -> int:
        """Number of tokens that are read, about."""
        return self.task.length * len(self.task.trials)


def plan_cells(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[str]],
    config: EvaluationConfig,
    tasks: Sequence[Task],
    text: FitText,
    store: Store,
    settings: Settings,
) -> tuple[list[Cell], list[str]]:
    """Return all cells with any trials, ordered by model, method, length and task, and a sentence
    for each value that was fitted on ``text`` for the layouts.

    This process makes the layouts of every n-th method of a model, and waits for the others.

    ``methods``: those that apply to each model, by its name. ``config``: what layouts depend on.
    """
    lengths = [*dict.fromkeys(task.length for task in tasks)]
    tasks = sorted(tasks, key=lambda task: lengths.index(task.length))
    precision = matmul_precision(settings.dtype, settings.device)
    of_layouts = layout_settings(config)
    computation = [settings.batch_tokens, settings.device, precision]
    plain = adapter(list[Layout])
    cells: list[Cell] = []
    sentences: list[str] = []
    for model in models:
        # The weights are read if anything is fitted.
        load = cache(partial(model.for_inference, settings.device, settings.dtype))
        inputs = {"model": model.fingerprint, "settings": computation}
        keys = {}
        for method in methods[model.name]:
            of_method = {"method": [method, of_layouts, text.key], "lengths": lengths}
            keys[method] = f"fit-{fingerprint(inputs | of_method)}"
        factors = [length / model.training_length for length in lengths]
        for method in [*keys][store.rank :: store.ranks]:
            if not store.values(keys[method]):
                found: list[str] = []
                layout_at = layouts_for(method, model.layout, config, load, text, found)
                made = [*map(layout_at, factors)]
                notes = [*dict.fromkeys(found)]
                store.add(keys[method], {"layouts": plain.dump_python(made), "notes": notes})
        for method in keys:
            fitted = store.wait(keys[method])[0]
            sentences += [f"{model.name}, {title_of(method)}: {note}" for note in fitted["notes"]]
            made = plain.validate_python(fitted["layouts"])
            layouts = dict(zip(lengths, made, strict=True))
            for task in tasks:
                of_cell = {
                    "layout": fingerprint(layouts[task.length]),
                    "reads": tokens_read(method, model.layout),
                    "length": task.length,
                    "task": [*task.titles, task.fingerprint],
                }
                key = f"cell-{fingerprint(inputs | of_cell)}"
                cells.append(Cell(model, method, layouts[task.length], task, key))
    return [cell for cell in cells if cell.tokens], sentences


def measure_cells(cells: Sequence[Cell], store: Store, settings: Settings) -> None:
    """Measure this process's share of what is not stored yet."""
    missing = {n: c for n, c in enumerate(cells) if not _is_complete(store.values(c.key))}
    log.info("%d cells, %d of these measured before", len(cells), len(cells) - len(missing))
    done, total = 0.0, sum(cell.tokens for cell in missing.values())
    with Progress("Evaluating", max(total, 1.0)) as progress:
        progress.advance_to(0)
        for saved in dict.fromkeys(cell.model for cell in missing.values()):
            model = saved.for_inference(settings.device, settings.dtype)
            for number, cell in missing.items():
                if cell.model is saved:
                    for tokens in _measure(cell, number, model, store, settings):
                        done += tokens
                        progress.advance_to(done)
            del model  # free the weights before the next model is read


def _measure(
    cell: Cell, number: int, model: LanguageModel, store: Store, settings: Settings
) -> Iterator[float]:
    """Read this process's batches of a cell that are not stored yet; yield the tokens of each
    batch. ``number``: of the cell, so that cells of one batch are shared too."""
    stored = {value["batch"] for value in store.values(cell.key)}
    with model.using(cell.layout, tokens_read(cell.method, cell.model.layout)):
        batches = cell.task.batches(model, settings.batch_tokens)
        for batch, read in enumerate(batches):
            if (number + batch) % store.ranks == store.rank and batch not in stored:
                began = time.perf_counter()
                value = {"batch": batch, "batches": len(batches), "values": read()}
                store.add(cell.key, value | {"seconds": time.perf_counter() - began})
            yield cell.tokens / len(batches)


def _is_complete(stored: Sequence[dict[str, Any]]) -> bool:
    """Return whether the values of all batches of a cell are stored."""
    return bool(stored) and len({value["batch"] for value in stored}) == stored[0]["batches"]


def trials_of(cells: Sequence[Cell], store: Store) -> pd.DataFrame:
    """Return the trials of all cells, as soon as they are measured, in :data:`TRIAL_COLUMNS` and
    ``seconds`` (of all trials of a cell together)."""
    tables = []
    for cell in cells:
        stored = store.wait(cell.key, _is_complete)
        values = [value for batch in stored for value in batch["values"]]
        trials, length = cell.task.trials, cell.task.length
        usual = {"text": trials.index, "depth": math.nan, "label": ""}
        trials = trials.assign(
            **{name: value for name, value in usual.items() if name not in trials},
            model=cell.model.name,
            method=cell.method,
            metric=cell.task.metric,
            length=length,
            factor=length / cell.model.training_length,
            seconds=round(sum(batch["seconds"] for batch in stored), 3),
        )
        for key in cell.task.titles:
            of_key = pd.Series({number: x for number, name, x in values if name == key})
            tables.append(trials.assign(task=key, value=of_key))
    return pd.concat(tables, ignore_index=True)[[*TRIAL_COLUMNS, "seconds"]]
