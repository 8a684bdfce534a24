"""The evaluation loop: a cell for each model, method, length and task.

All models and methods are measured on the same trials. A long cell is measured in parts. Each part
is stored when it is finished, so that an interrupted evaluation resumes. With several processes,
each takes every n-th part.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pandas as pd

from trainer.common.fields import adapter
from trainer.common.progress import Progress
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.measurements import Measurement
from trainer.evaluation.methods import Method
from trainer.evaluation.passes import Piece
from trainer.evaluation.results import TRIAL_COLUMNS, counted, table
from trainer.evaluation.saved_model import Dtype, SavedModel, multiplied_in
from trainer.evaluation.store import Store
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

PART = {"cpu": 2e10, "cuda": 3e15}
"""Operations of a part of a cell, by device: less than a second on a core, and seconds to half a
minute on a GPU. This bounds what an interruption loses."""
PREFILL = 32768
"""Tokens of a long sequence that are read at once."""


@dataclass(frozen=True)
class Settings:
    """Settings that decide how models are computed.

    ``device``: "cpu" or "cuda". ``dtype``: of the weights. ``batch_tokens``: of a forward pass.
    """

    batch_tokens: int = 4096
    device: str = "cpu"
    dtype: Dtype = "fp32"

    @property
    def key(self) -> list[Any]:
        """All of it that a result depends on."""
        return [self.batch_tokens, self.device, multiplied_in(self.dtype, self.device)]


@dataclass(frozen=True, eq=False)
class Cell:
    """One model, method, length and task; ``key``: all inputs of its result."""

    model: SavedModel
    method: Method
    length: int
    task: Measurement
    key: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Number of tokens that it reads, about."""
        return self.length * self.task.sequences(self.length)

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

    def parts(self, device: str) -> list[tuple[Piece, dict[str, Any]]]:
        """Return the parts of the cell with the keys of their results.

        Their number is independent of the number of processes, so that a resumed evaluation can use
        fewer or more.
        """
        sequences = self.task.sequences(self.length)
        work = sequences * forward_flops(self.model.config, self.model.layout, self.length)
        count = max(1, min(math.ceil(work / PART[device]), sequences))
        return [((i, count), {**self.key, "part": [i, count]}) for i in range(count)]

    def measure(
        self, model: LanguageModel, layout: Layout, batch_tokens: int, part: Piece
    ) -> dict[str, Any]:
        """Return the values of a part's trials, and the seconds that they took."""
        began, reads = time.perf_counter(), self.method.reads
        reads = reads if reads and reads < self.length else None
        with model.using(layout):
            values = self.task.read(model, self.length, batch_tokens, reads, part)
        return {"values": values, "seconds": time.perf_counter() - began}


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
    method, task and length. ``notes``: descriptions of the fitted parameters.
    """

    trials: pd.DataFrame = field(default_factory=lambda: table([], TRIAL_COLUMNS))
    seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    parts = [(cell, *part) for cell in cells for part in cell.parts(settings.device)]
    missing = [(cell, count) for cell, (_, count), key in parts if not store.has("part", key)]
    sizes = counted(len(cells), "cell"), counted(len(parts), "part")
    log.info("%s in %s, %d of these measured before", *sizes, len(parts) - len(missing))
    total, done = sum(cell.tokens / count for cell, count in missing) / ranks, 0.0
    measured = Measured()
    with Progress("Evaluating", max(total, 1.0), silent=rank > 0) as progress:
        progress.advance_to(0)
        for saved in dict.fromkeys(cell.model for cell in cells):
            # The weights are read if anything is missing.
            load = cache(partial(saved.for_inference, settings.device, settings.dtype, PREFILL))
            of_model = [cell for cell in cells if cell.model is saved]
            fits = _fits(of_model, load, text, store, settings, rank, ranks)
            for cell, part, key in [part for part in parts if part[0].model is saved][rank::ranks]:
                if not store.has("part", key):
                    layout = fits[cell.method]["layouts"][cell.length]
                    value = cell.measure(load(), layout, settings.batch_tokens, part)
                    store.put("part", key, value)
                    done += cell.tokens / part[1]
                    progress.advance_to(done)
            for method, fit in fits.items():
                notes = dict.fromkeys(fit["notes"])
                measured.notes += [f"{saved.name}, {method.title}: {note}" for note in notes]
    if rank:
        return Measured()
    results: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
    for cell, _, key in parts:
        results[cell].append(store.wait("part", key))
    tables = []
    for cell, of_parts in results.items():
        values = {
            trial: value
            for result in of_parts
            for trial, metric, value in result["values"]
            if metric == cell.task.metric
        }
        tables.append(cell.trials.assign(value=pd.Series(values))[[*TRIAL_COLUMNS]])
        place = (cell.model.name, cell.method.key, cell.task.key, cell.length)
        measured.seconds[place] = round(sum(result["seconds"] for result in of_parts), 3)
    measured.trials = pd.concat(tables, ignore_index=True)
    return measured


def _fits(
    cells: Sequence[Cell],
    load: Callable[[], LanguageModel],
    text: FitText,
    store: Store,
    settings: Settings,
    rank: int,
    ranks: int,
) -> dict[Method, dict[str, Any]]:
    """Fit the methods of one model, of which this process fits every ``ranks``-th.

    Returns ``layouts`` by length and ``notes`` of each method.
    """
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    saved, plain = cells[0].model, adapter(list[Layout])
    factors = [length / saved.training_length for length in lengths]

    def fit(method: Method) -> dict[str, Any]:
        fitting = Fitting(load, text, settings.batch_tokens)
        layouts = plain.dump_python(list(map(method.layouts(fitting), factors)))
        return {"layouts": layouts, "notes": fitting.notes}

    keys = {
        method: {
            "model": saved.fingerprint,
            "method": [method.key, method.settings, text.key],
            "lengths": lengths,
            "settings": settings.key,
        }
        for method in methods
        if any(map(method.fits, factors))
    }
    for method in [*keys][rank::ranks]:
        if not store.has("fit", keys[method]):
            store.put("fit", keys[method], fit(method))
    fits = {m: store.wait("fit", keys[m]) if m in keys else fit(m) for m in methods}
    for each in fits.values():
        layouts = plain.validate_python(each["layouts"])
        each["layouts"] = dict(zip(lengths, layouts, strict=True))
    return fits
