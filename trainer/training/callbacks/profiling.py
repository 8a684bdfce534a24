"""Profiles of the CPU and the GPU in a few chosen steps."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.common.files import write_atomically
from trainer.training.callbacks.steps import begins_step, ends_step

log = logging.getLogger(__name__)

ROWS = 40
"""Operators in the table."""


class Profiling(L.Callback):
    """Profiles the steps ``first`` to ``last`` of one rank into ``directory``.

    Writes a trace (``steps-10-13-rank-0.json.gz``, for Perfetto) and a table of the most expensive
    operators (``.txt``). The step before the first one, if any, warms up the profiler.
    """

    def __init__(self, first: int, last: int, directory: Path, rank: int) -> None:
        self.first, self.last, self.directory, self.rank = first, last, directory, rank
        self._profiler: profile | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        """Start one step early."""
        step = trainer.global_step + 1
        due = self.first - 1 <= step <= self.last and self._profiler is None
        if not due or not begins_step(trainer, index):
            return
        begin = max(step, self.first)  # later than ``first`` after a resume
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # no step for it
            steps = schedule(wait=0, warmup=begin - step, active=self.last - begin + 1, repeat=1)
        gpu = [ProfilerActivity.CUDA] if module.device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=steps,
            on_trace_ready=partial(self._write, f"steps-{begin}-{self.last}-rank-{self.rank}"),
            record_shapes=True,
            acc_events=True,
        )
        self._profiler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Mark the end of a step; after the last one, write and stop."""
        if self._profiler is None or not ends_step(trainer, index):
            return
        if trainer.global_step == self.last:
            module.timer.enter("monitor")
        self._profiler.step()
        if trainer.global_step == self.last:
            self.on_train_end()
            module.timer.enter("data")

    def on_train_end(self, *_: Any) -> None:
        """Stop; a run that ends earlier writes what there is."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def on_exception(self, *_: Any) -> None:
        """Stop after an error, too."""
        self.on_train_end()

    def _write(self, name: str, profiler: profile) -> None:
        gpu = ProfilerActivity.CUDA in profiler.activities
        by = "self_device_time_total" if gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
        try:
            write_atomically(self.directory / f"{name}.txt", table)
            profiler.export_chrome_trace(str(self.directory / f"{name}.json.gz"))
        except OSError as error:  # a full disk stops no run
            log.warning("The profile %s could not be written (%s)", name, error)
