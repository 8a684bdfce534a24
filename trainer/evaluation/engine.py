"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. A long cell is measured in parts. Each part
is stored when it is finished, so that an interrupted evaluation resumes. With several processes,
each takes every n-th part.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.progress import Progress
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.measurements import Measurement
from trainer.evaluation.methods import Method
from trainer.evaluation.passes import Part
from trainer.evaluation.results import TRIAL_COLUMNS, counted, table
from trainer.evaluation.saved_model import Dtype, SavedModel, multiplied_in
from trainer.evaluation.store import Store
from trainer.model.flops import forward_flops
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

PART = {"cpu": 2e10, "cuda": 3e15}
"""Operations of a part of a cell, by device: less than a second on a core, and seconds to half a
minute on a GPU. This bounds what an interruption loses."""
PREFILL = 32768
"""Tokens of a long sequence that are read at once."""


@dataclass(frozen=True)
class Settings:
    """How models are computed: on ``device`` ("cpu" or "cuda"), with weights of ``dtype``, and
    ``batch_tokens`` in a forward pass."""

    batch_tokens: int = 4096
    device: str = "cpu"
    dtype: Dtype = "fp32"

    @property
    def key(self) -> list[Any]:
        """All of it that a result depends on."""
        return [self.batch_tokens, self.device, multiplied_in(self.dtype, self.device)]


@dataclass(frozen=True)
class Cell:
    """One model, method, length and task; ``key``: all inputs of its result."""

    model: SavedModel
    method: Method
    length: int
    task: Measurement
    key: dict[str, Any]

    @property
    def trials(self) -> pd.DataFrame:
        """The cell's trials, in columns of trials.parquet, without their values."""
        return self.task.trials(self.length).assign(
            model=self.model.name,
            method=self.method.key,
            task=self.task.key,
            metric="loss" if self.task.metric == "loss" else "score",
            length=self.length,
            factor=self.length / self.model.training_length,
        )

    def parts(self, device: str) -> list[tuple[Part, dict[str, Any]]]:
        """Return the parts of the cell with the keys of their results.

        Their number is independent of the number of processes, so that a resumed evaluation can use
        fewer or more.
        """
        sequences = self.task.sequences(self.length)
        work = sequences * forward_flops(self.model.config, self.model.layout, self.length)
        count = max(1, min(math.ceil(work / PART[device]), sequences))
        return [((i, count), {**self.key, "part": [i, count]}) for i in range(count)]


def plan_cells(
    models: Sequence[SavedModel],
    methods: dict[str, list[Method]],
    tasks: Sequence[Measurement],
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
                fits = method.fits(length / model.training_length)
                for task in tasks:
                    key = {
                        "model": model.fingerprint,
                        "method": [method.key, method.settings, text.key if fits else None],
                        "task": task.fingerprint(length),
                        "length": length,
                        "settings": settings.key,  # parts hold whole batches
                    }
                    cells.append(Cell(model, method, length, task, key))
    return cells


@dataclass
class Measured:
    """Results of an evaluation.

    ``trials``: see :data:`~trainer.evaluation.results.TRIAL_COLUMNS`. ``seconds``: by model,
    method, task and length. ``notes``: descriptions of the fitted parameters. ``temperature``: the
    fitted coefficient of a temperature, by model.
    """

    trials: pd.DataFrame = field(default_factory=lambda: table([], TRIAL_COLUMNS))
    seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, float] = field(default_factory=dict)


def measure_cells(
    cells: Sequence[Cell],
    text: FitText,
    store: Store,
    settings: Settings,
    rank: int = 0,
    ranks: int = 1,
) -> Measured:
    """Measure what is not stored yet, and return all results in the order of ``cells``.

    Processes ``rank`` of ``ranks`` share the work; only the first one returns results.
    """
    parts = [(cell, key) for cell in cells for _, key in cell.parts(settings.device)]
    missing = [(cell, key) for cell, key in parts if not store.has("part", key)]
    sizes = counted(len(cells), "cell"), counted(len(parts), "part")
    log.info("%s in %s, %d of these measured before", *sizes, len(parts) - len(missing))
    total, done = sum(_tokens(*part) for part in missing) / ranks, 0.0
    measured = Measured()
    with Progress("Evaluating", max(total, 1.0), silent=rank > 0) as progress:
        progress.advance_to(0)
        for _, of_model in groupby(cells, key=lambda cell: cell.model.name):
            share = (rank, ranks)
            for tokens in _measure_model([*of_model], text, store, settings, share, measured):
                done += tokens
                progress.advance_to(done, tokens=done)
    if rank:
        return Measured()
    store.wait_for(("part", key) for _, key in parts)
    tables = []
    for cell in cells:
        results = [store.get("part", key, dict) for _, key in cell.parts(settings.device)]
        values = {
            trial: value
            for result in results
            for trial, metric, value in result["values"]
            if metric == cell.task.metric
        }
        tables.append(cell.trials.assign(value=pd.Series(values))[[*TRIAL_COLUMNS]])
        place = (cell.model.name, cell.method.key, cell.task.key, cell.length)
        measured.seconds[place] = round(sum(result["seconds"] for result in results), 3)
    measured.trials = pd.concat(tables, ignore_index=True)
    return measured


def _tokens(cell: Cell, key: dict[str, Any]) -> float:
    """Return the tokens of one part of a cell."""
    return cell.length * cell.task.sequences(cell.length) / key["part"][1]


def _measure_model(
    cells: Sequence[Cell],
    text: FitText,
    store: Store,
    settings: Settings,
    share: tuple[int, int],
    measured: Measured,
) -> Iterator[float]:
    """Fit the methods of one model, then measure this process's part of its cells.

    Yields the tokens of each part that was measured. Notes and temperatures of fitted methods go
    into ``measured``.
    """
    (rank, ranks), saved = share, cells[0].model
    load = cache(
        lambda: saved.for_inference(settings.device, settings.dtype, chunk=PREFILL)
    )  # the weights are read if anything is missing
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = list(dict.fromkeys(cell.length for cell in cells))

    def fit(method: Method) -> dict[str, Any]:
        fitting = Fitting(load, text, settings.batch_tokens)
        layout_at = method.layouts(fitting)
        layouts = [layout_at(length / saved.training_length) for length in lengths]
        plain = adapter(list[Layout]).dump_python(layouts)
        return {"layouts": plain, "notes": fitting.notes, "temperature": fitting.temperature}

    keys = {
        method: {
            "model": saved.fingerprint,
            "method": [method.key, method.settings, text.key],
            "lengths": lengths,
            "settings": settings.key,
        }
        for method in methods
        if any(method.fits(length / saved.training_length) for length in lengths)
    }
    for method in [*keys][rank::ranks]:
        store.get("fit", keys[method], partial(fit, method))
    store.wait_for(("fit", key) for key in keys.values())
    layouts: dict[tuple[Method, int], Layout] = {}
    for method in methods:
        fitted = store.get("fit", keys[method], dict) if method in keys else fit(method)
        of_lengths = adapter(list[Layout]).validate_python(fitted["layouts"])
        layouts |= {(method, n): layout for n, layout in zip(lengths, of_lengths, strict=True)}
        notes = dict.fromkeys(fitted["notes"])
        measured.notes += [f"{saved.name}, {method.title}: {note}" for note in notes]
        if method.key == "temperature" and fitted["temperature"] is not None:
            measured.temperature[saved.name] = fitted["temperature"]

    def measure(cell: Cell, part: Part) -> dict[str, Any]:
        began, model, reads = time.perf_counter(), load(), cell.method.reads
        reads = reads if reads and reads < cell.length else None
        with model.using(layouts[cell.method, cell.length]):
            values = cell.task.read(model, cell.length, settings.batch_tokens, reads, part)
        return {"values": values, "seconds": time.perf_counter() - began}

    parts = [(cell, *part) for cell in cells for part in cell.parts(settings.device)]
    for cell, part, key in parts[rank::ranks]:
        if not store.has("part", key):
            store.get("part", key, partial(measure, cell, part))
            yield _tokens(cell, key)
