"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. The layouts of a model come first: what is
fitted on text is fitted before the model is measured. Layouts and the values of each batch are
stored, so that an interrupted evaluation resumes. With several processes, each makes the layouts of
every n-th method and reads every n-th batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.processes import check_signals
from trainer.common.progress import Progress
from trainer.common.ranks import best_precision
from trainer.config import EvaluationConfig
from trainer.evaluation.fitting import FitText
from trainer.evaluation.methods import layout_inputs, layouts_for, title_of, tokens_read
from trainer.evaluation.results import TRIAL_COLUMNS
from trainer.evaluation.saved_model import SavedModel, matmul_precision
from trainer.evaluation.store import Store, fingerprint
from trainer.evaluation.task import Task
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout


class Cell(NamedTuple):
    """One model, method and task at a length; ``key``: of its values, by all of their inputs."""

    model: SavedModel
    method: str
    layout: Layout
    task: Task
    key: str


def measure(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    config: EvaluationConfig,
    text: FitText,
    store: Store,
    device: str,
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials of all cells, ordered by model, method, length and task, in
    :data:`TRIAL_COLUMNS` and ``seconds`` (of all trials of a cell together), and a sentence for
    each value that was fitted on ``text``.

    This process measures its share of what is not stored yet, and waits for the others.

    ``methods``: those that apply to each model, by its name. ``device``: "cpu" or "cuda".
    """
    dtype = config.dtype or best_precision(device)
    computation = [config.batch_tokens, device, matmul_precision(dtype, device)]
    sizes = {task: task.length * len(task.trials) for task in tasks}
    total, done = sum(sizes.values()) * sum(map(len, methods.values())), 0
    cells: list[Cell] = []
    notes: list[str] = []
    with Progress("Evaluating", max(total, 1)) as progress:
        for model in models:
            # The weights are read if anything is missing, and freed before the next model's.
            load = cache(partial(model.for_inference, device, dtype))
            planned, fitted = _plan(
                model, methods[model.name], tasks, config, computation, load, text, store
            )
            notes += fitted
            for number, cell in enumerate(planned, len(cells)):
                if not _is_complete(store.values(cell.key)):
                    for share in _measure(cell, number, load(), config.batch_tokens, store):
                        progress.advance_to(done + share * sizes[cell.task])
                done += sizes[cell.task]
            cells += planned
    return pd.concat([_trials(cell, store) for cell in cells], ignore_index=True), notes


def _plan(
    model: SavedModel,
    methods: Sequence[str],
    tasks: Sequence[Task],
    config: EvaluationConfig,
    computation: Sequence[Any],
    load: Callable[[], LanguageModel],
    text: FitText,
    store: Store,
) -> tuple[list[Cell], list[str]]:
    """Return a model's cells with any trials, and the sentences about its methods.

    This process makes the layouts of every n-th method, and waits for the others. ``computation``:
    settings that change digits of values. ``load``: reads the model, if a method is fitted.
    """
    lengths = [*dict.fromkeys(task.length for task in tasks)]
    inputs = {"model": model.fingerprint, "settings": computation}
    factors = [length / model.training_length for length in lengths]
    layout_list = adapter(list[Layout])
    keys = {}
    for method in methods:
        of_method = {"method": [method, layout_inputs(text, config)], "lengths": lengths}
        keys[method] = f"fit-{fingerprint(inputs | of_method)}"
    for method in [*keys][store.rank :: store.ranks]:
        if not store.values(keys[method]):
            layouts, notes = layouts_for(method, model.layout, factors, config, load, text)
            values = {"layouts": layout_list.dump_python(layouts), "notes": notes}
            store.add(keys[method], values)
    cells: list[Cell] = []
    sentences: list[str] = []
    for method, key in keys.items():
        fitted = store.wait(key)[0]
        layouts = layout_list.validate_python(fitted["layouts"])
        sentences += [f"{model.name}, {title_of(method)}: {note}" for note in fitted["notes"]]
        for length, layout in zip(lengths, layouts, strict=True):
            of_cell = {
                "layout": fingerprint(layout),
                "reads": tokens_read(method, model.layout),
                "length": length,
            }
            for task in tasks:
                if task.length == length and len(task.trials):
                    of_task = {"task": [*task.titles, task.fingerprint]}
                    name = f"cell-{fingerprint(inputs | of_cell | of_task)}"
                    cells.append(Cell(model, method, layout, task, name))
    return cells, sentences


def _measure(
    cell: Cell, number: int, model: LanguageModel, batch_tokens: int, store: Store
) -> Iterator[float]:
    """Read this process's batches of a cell that are not stored yet; yield the share of all batches
    after each. ``number``: of the cell, so that cells of one batch are shared too."""
    stored = {value["batch"] for value in store.values(cell.key)}
    with model.using(cell.layout, tokens_read(cell.method, cell.model.layout)):
        batches = cell.task.batches(model, batch_tokens)
        for batch, read in enumerate(batches):
            if (number + batch) % store.ranks == store.rank and batch not in stored:
                began = time.perf_counter()
                value = {"batch": batch, "batches": len(batches), "values": read()}
                store.add(cell.key, value | {"seconds": time.perf_counter() - began})
                check_signals()
                yield (batch + 1) / len(batches)


def _is_complete(stored: Sequence[dict[str, Any]]) -> bool:
    """Return whether the values of all batches of a cell are stored."""
    return bool(stored) and len({value["batch"] for value in stored}) == stored[0]["batches"]


def _trials(cell: Cell, store: Store) -> pd.DataFrame:
    """Return the trials of a cell as soon as they are measured."""
    stored = store.wait(cell.key, _is_complete)
    seconds = sum(batch["seconds"] for batch in stored)
    values = [value for batch in stored for value in batch["values"]]
    trials, length = cell.task.trials, cell.task.length
    defaults = {"text": trials.index, "depth": math.nan, "label": ""}
    trials = trials.assign(
        **{name: value for name, value in defaults.items() if name not in trials},
        model=cell.model.name,
        method=cell.method,
        metric=cell.task.metric,
        length=length,
        factor=length / cell.model.training_length,
        seconds=round(seconds, 3),
    )
    tables = []
    for key in cell.task.titles:
        of_key = pd.Series({number: x for number, name, x in values if name == key})
        tables.append(trials.assign(task=key, value=of_key))
    return pd.concat(tables)[[*TRIAL_COLUMNS, "seconds"]]
