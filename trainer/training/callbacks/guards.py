"""Guards of the process during training; a run that needs none trains the same without them.

They rewind a run that diverges, end a process that hangs, collect
garbage at fixed steps and profile chosen steps.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import math
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.common.errors import os_reason
from trainer.common.files import write_atomically
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.module import LanguageModule, StepCallback

log = logging.getLogger(__name__)


def make_guards(config: RunConfig, ranks: Ranks) -> list[StepCallback]:
    """Return the guards but :class:`Rewind`, in the order in which Lightning calls them."""
    guards: list[StepCallback] = [
        Watchdog(config, Path(config.run_dir), ranks.is_rank_zero),
        GarbageCollection(config.trainer.gc_every),
    ]
    if config.trainer.profile_steps:
        first, last = config.trainer.profile_steps
        guards.append(Profiling(first, last, Path(config.run_dir) / "profile", ranks.rank))
    return guards


MOST_SKIPPED = 32
"""Updates skipped in a row after which a run without ``trainer.rewind_after`` ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


class Rewind(StepCallback):
    """Stops the run if ``trainer.rewind_after`` updates in a row were skipped.

    The run then resumes from its last checkpoint before them and skips the samples since. Without
    this key it stops after :data:`MOST_SKIPPED` and ends with an error, but a control goes on, and
    the report warns of it. ``diverged`` holds the last sound step and the step of the stop. The
    count is read with each row of metrics, so that it causes no further host sync.
    """

    def __init__(self, config: RunConfig, is_control: bool = False) -> None:
        self.rewinds = config.trainer.rewind_after is not None
        self.limit = config.trainer.rewind_after or (math.inf if is_control else MOST_SKIPPED)
        self.log_every = config.trainer.log_every
        self.diverged: tuple[int, int] | None = None

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Stop if the limit is reached."""
        step = trainer.global_step
        is_last = step == trainer.max_steps or module.phase_ended
        if step % self.log_every == 0 or is_last:
            self.judge(step, module.tally.skipped_in_a_row())
            trainer.should_stop |= self.diverged is not None

    def judge(self, step: int, in_a_row: int) -> None:
        """Set ``diverged`` if the updates that were skipped ``in_a_row`` until ``step`` reach the
        limit."""
        if in_a_row >= self.limit:
            self.diverged = step - in_a_row, step
            log.warning(
                "Step %d: %d updates in a row had no finite loss and gradient; %s",
                *(step, in_a_row, "going back" if self.rewinds else "stopping"),
            )


def watch(timeout: float | None, times: int = 1) -> None:
    """End the process with the stacks of all threads, unless called again within ``times``
    timeouts.

    The timeout is in seconds; None disables the watchdog.
    """
    if timeout is not None:
        faulthandler.dump_traceback_later(
            times * timeout, exit=True, file=sys.__stderr__ or sys.stderr
        )


class Watchdog(StepCallback):
    """Ends a process that hangs, with the stacks of all its threads, and writes a heartbeat.

    A step that takes longer than ``trainer.step_timeout`` seconds has lost a rank, a file system or
    a device, and would wait until the end of the job. The first step, which may compile, has ten
    times as long. ``heartbeat.json`` contains the last step and the time of its end.
    """

    def __init__(self, config: RunConfig, directory: Path, is_rank_zero: bool) -> None:
        self.timeout = config.trainer.step_timeout
        self.log_every = config.trainer.log_every
        self.heartbeat = directory / "heartbeat.json" if is_rank_zero else None
        self._is_first_step = True
        self._write_failed = False

    def on_train_start(self, *_: Any) -> None:
        """Watch the first step."""
        watch(self.timeout, 10)

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Watch the next step."""
        watch(self.timeout, 10 if self._is_first_step else 1)
        self._is_first_step = False

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Write the heartbeat every ``log_every`` steps and after the last step."""
        step = trainer.global_step
        due = step % self.log_every == 0 or step == trainer.max_steps
        if self.heartbeat and due:
            beat = {"step": step, "time": time.time(), "pid": os.getpid()}
            try:
                write_atomically(self.heartbeat, json.dumps(beat))
            except OSError as error:  # a full disk stops no run
                if not self._write_failed:
                    log.warning("%s: %s; the run goes on", self.heartbeat.name, os_reason(error))
                self._write_failed = True
            else:
                self._write_failed = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()

    on_exception = on_train_end


def freeze_modules() -> None:
    """Collect garbage, then exempt all present objects from future collections.

    Imported modules have half a million objects, which cost every collection 0.3 s (AMD EPYC,
    idle).
    """
    gc.collect()
    gc.freeze()


class GarbageCollection(StepCallback):
    """Collection every ``every`` steps and at no other time (None: Python's default).

    A collection delays its rank, and all others wait for it in the next collective. By default,
    some rank collects in nearly every step.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every

    def on_train_start(self, *_: Any) -> None:
        """Collect, and disable automatic collection."""
        if self.every is not None:
            gc.collect()
            gc.disable()

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Collect if it is due."""
        if self.every and trainer.global_step % self.every == 0:
            gc.collect()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Enable automatic collection again."""
        if self.every is not None:
            gc.enable()

    on_exception = on_train_end


PROFILED_OPERATORS = 40
"""Number of operators in a profile's table."""


class Profiling(StepCallback):
    """Profiles the steps ``first`` to ``last`` of one rank into ``directory``.

    Writes a trace (``steps-10-13-rank-0.json.gz``, for Perfetto) and a table of the most expensive
    operators (``.txt``). The step before the first one, if any, warms up the profiler.
    """

    def __init__(self, first: int, last: int, directory: Path, rank: int) -> None:
        self.first, self.last, self.directory, self.rank = first, last, directory, rank
        self._profiler: profile | None = None

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Start one step early."""
        step = trainer.global_step + 1
        if not self.first - 1 <= step <= self.last or self._profiler is not None:
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

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Mark the end of a step; after the last one, write and stop."""
        if self._profiler is None:
            return
        if trainer.global_step == self.last:
            module.timer.enter("monitor")
        self._profiler.step()
        if trainer.global_step == self.last:
            self.on_train_end()
            module.timer.enter("data")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop; a run that ends earlier writes what there is."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    on_exception = on_train_end

    def _write(self, name: str, profiler: profile) -> None:
        gpu = ProfilerActivity.CUDA in profiler.activities
        by = "self_device_time_total" if gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=PROFILED_OPERATORS)
        try:
            write_atomically(self.directory / f"{name}.txt", table)
            profiler.export_chrome_trace(str(self.directory / f"{name}.json.gz"))
        except OSError as error:  # a full disk stops no run
            log.warning("The profile %s could not be written (%s)", name, error)
