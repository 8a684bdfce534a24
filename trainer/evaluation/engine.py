"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. The layouts of a model come first: what is
fitted on text is fitted before the model is measured. Layouts and the values of each batch are
stored, so that an interrupted evaluation resumes. With several processes, each makes every n-th fit
and reads every n-th batch.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.processes import check_signals
from trainer.common.progress import Progress
from trainer.common.ranks import tf32
from trainer.config import EvaluationConfig
from trainer.evaluation.fitting import FitText
from trainer.evaluation.methods import layout_inputs, layouts_for, parts_of, title_of, tokens_read
from trainer.evaluation.results import TRIAL_COLUMNS
from trainer.evaluation.saved_model import Dtype, SavedModel, matmul_precision
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


class Setup(NamedTuple):
    """Settings shared by all cells.

    ``config``: settings of methods and computation. ``text``: text that methods are fitted on.
    ``store``: holds layouts and values. ``device``: "cpu" or "cuda". ``dtype``: of the weights.
    """

    config: EvaluationConfig
    text: FitText
    store: Store
    device: str
    dtype: Dtype

    def inputs(self, model: SavedModel) -> dict[str, Any]:
        """Return what all keys of a model have: its contents, and what changes digits of values."""
        precision = matmul_precision(self.dtype, self.device)
        settings = [self.config.batch_tokens, self.device, precision]
        return {"model": model.fingerprint, "settings": settings}


def measure(
    models: Sequence[SavedModel],
    methods: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    setup: Setup,
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials of all cells, ordered by model, method, length and task, in
    :data:`TRIAL_COLUMNS` and ``seconds`` (of all trials of a cell together), and a sentence for
    each value that was fitted on text.

    This process measures its share of what is not stored yet, and waits for the others.

    ``methods``: those that apply to each model, by its name.
    """
    store = setup.store
    sizes = {task: task.length * len(task.trials) for task in tasks}
    total = sum(sizes.values()) * sum(map(len, methods.values()))
    done = 0
    numbers: dict[str, int] = {}
    cells: list[Cell] = []
    notes: list[str] = []
    with Progress("Evaluating", max(total, 1)) as progress, tf32(setup.device):
        for model in models:
            # The weights are read if anything is missing, and freed before the next model's.
            load = cache(partial(model.for_inference, setup.device, setup.dtype))
            fits = _fits(model, methods[model.name], tasks, setup)
            for fit in fits[store.rank :: store.ranks]:
                _make_layouts(model, fit, load, setup)
            cells_of_model: list[Cell] = []
            for fit in fits:
                stored = store.wait(fit.key)[0]
                layouts = adapter(list[Layout]).validate_python(stored["layouts"])
                title = f"{model.name}, {title_of(fit.method)}"
                notes += [f"{title}: {note}" for note in stored["notes"]]
                cells_of_model += _cells(model, fit, layouts, tasks, setup)
            for cell in cells_of_model:
                number = numbers.setdefault(cell.key, len(numbers))
                if not _whole(store.values(cell.key)):
                    for share in _measure(cell, number, load(), setup):
                        progress.advance_to(done + share * sizes[cell.task])
                done += sizes[cell.task]
            cells += cells_of_model
    trials = pd.concat([_trials(cell, store) for cell in cells], ignore_index=True)
    return trials, [*dict.fromkeys(notes)]


class Fit(NamedTuple):
    """Layouts of a method that are made together: at all lengths in a joint fit, or at one."""

    method: str
    lengths: Sequence[int]
    key: str


def _fits(
    model: SavedModel, methods: Sequence[str], tasks: Sequence[Task], setup: Setup
) -> list[Fit]:
    """Return the fits of a model: one for each method and length, or for all lengths if joint."""
    lengths = [*dict.fromkeys(task.length for task in tasks)]
    fits = []
    for method in methods:
        inputs = layout_inputs(method, setup.text, setup.config)
        is_joint = any("lengths" in part.reads for part in parts_of(method))
        groups = [lengths] if is_joint else [[length] for length in lengths]
        for together in groups:
            key = f"fit-{fingerprint(setup.inputs(model), inputs, together)}"
            fits.append(Fit(method, together, key))
    return fits


def _make_layouts(
    model: SavedModel, fit: Fit, load: Callable[[], LanguageModel], setup: Setup
) -> None:
    """Store the layouts of a fit unless they are; ``load`` reads the model, if text is needed."""
    if setup.store.values(fit.key):
        return
    factors = [length / model.training_length for length in fit.lengths]
    layouts, notes = layouts_for(fit.method, model.layout, factors, setup.config, load, setup.text)
    values = {"layouts": adapter(list[Layout]).dump_python(layouts), "notes": notes}
    setup.store.add(fit.key, values)


def _cells(
    model: SavedModel, fit: Fit, layouts: Sequence[Layout], tasks: Sequence[Task], setup: Setup
) -> list[Cell]:
    """Return the cells with any trials of a model with the layouts of a fit."""
    cells: list[Cell] = []
    for length, layout in zip(fit.lengths, layouts, strict=True):
        inputs = setup.inputs(model) | {
            "layout": fingerprint(layout),
            "reads": tokens_read(fit.method, model.layout),
            "length": length,
        }
        for task in tasks:
            if task.length == length and len(task.trials):
                of_task = {"task": [*task.titles, task.fingerprint]}
                key = f"cell-{fingerprint(inputs | of_task)}"
                cells.append(Cell(model, fit.method, layout, task, key))
    return cells


def _measure(cell: Cell, number: int, model: LanguageModel, setup: Setup) -> Iterator[float]:
    """Read this process's batches of a cell that are not stored yet; yield the share of all batches
    after each. ``number``: of the key, so that cells of one batch are shared too."""
    store = setup.store
    with model.using(cell.layout, tokens_read(cell.method, cell.model.layout)):
        batches = cell.task.batches(model, setup.config.batch_tokens)
        stored = {x["batch"] for x in store.values(cell.key) if x["batches"] == len(batches)}
        for batch, read in enumerate(batches):
            if (number + batch) % store.ranks == store.rank and batch not in stored:
                began = time.perf_counter()
                value = {"batch": batch, "batches": len(batches), "values": read()}
                store.add(cell.key, value | {"seconds": time.perf_counter() - began})
                check_signals()
                yield (batch + 1) / len(batches)


def _whole(stored: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one value for every batch of a cell, or nothing if one is missing."""
    batches: dict[int, dict[int, dict[str, Any]]] = {}  # by their number, if trials were cut anew
    for value in stored:
        batches.setdefault(value["batches"], {})[value["batch"]] = value
    return next(([*x.values()] for number, x in batches.items() if len(x) == number), [])


def _trials(cell: Cell, store: Store) -> pd.DataFrame:
    """Return the trials of a cell as soon as they are measured."""
    batches = store.wait(cell.key, _whole)
    seconds = sum(batch["seconds"] for batch in batches)
    values = [value for batch in batches for value in batch["values"]]
    trials = cell.task.trials
    defaults = {"text": trials.index, "depth": math.nan, "label": ""}
    trials = trials.assign(
        **{name: value for name, value in defaults.items() if name not in trials},
        model=cell.model.name,
        method=cell.method,
        metric=cell.task.metric,
        length=cell.task.length,
        factor=cell.task.length / cell.model.training_length,
        seconds=round(seconds, 3),
    )
    tables = []
    for key in cell.task.titles:
        of_key = pd.Series({number: x for number, name, x in values if name == key})
        tables.append(trials.assign(task=key, value=of_key))
    return pd.concat(tables)[[*TRIAL_COLUMNS, "seconds"]]
