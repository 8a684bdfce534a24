"""Guards of the process during training; a run that needs none trains the same without them.

They stop a run that diverges, end a process that hangs and profile
chosen steps.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.common.files import write_atomically
from trainer.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.module import LanguageModule, StepCallback

log = logging.getLogger(__name__)


def make_guards(config: RunConfig, ranks: Ranks) -> list[StepCallback]:
    """Return the guards but :class:`Divergence`, in the order in which Lightning calls them."""
    guards: list[StepCallback] = [Watchdog(config.trainer.step_timeout)]
    if config.trainer.profile_steps:
        first, last = config.trainer.profile_steps
        guards.append(Profiling(first, last, Path(config.run_dir) / "profile", ranks.rank))
    return guards


MOST_SKIPPED = 32
"""Updates skipped in a row after which a run ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


class Divergence(StepCallback):
    """Stops the run after :data:`MOST_SKIPPED` skipped updates in a row; a control goes on.

    ``diverged`` holds the last sound step and the step of the stop. The count is read with each row
    of metrics, so that it causes no further host sync.
    """

    def __init__(self, config: RunConfig, is_control: bool = False) -> None:
        self.limit = math.inf if is_control else MOST_SKIPPED
        self.log_every = config.trainer.log_every
        self.diverged: tuple[int, int] | None = None

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Stop if the limit is reached."""
        step = trainer.global_step
        if step % self.log_every == 0 or step == trainer.max_steps:
            self.judge(step, module.tally.skipped_in_a_row())
            trainer.should_stop |= self.diverged is not None

    def judge(self, step: int, in_a_row: int) -> None:
        """Set ``diverged`` if the updates that were skipped ``in_a_row`` until ``step`` reach the
        limit."""
        if in_a_row >= self.limit:
            self.diverged = step - in_a_row, step


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
    """Ends a process that hangs, with the stacks of all its threads.

    A step that takes longer than ``trainer.step_timeout`` seconds has lost a rank, a file system or
    a device, and would wait until the end of the job. The first step, which may compile, has ten
    times as long.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._is_first_step = True

    def on_train_start(self, *_: Any) -> None:
        """Watch the first step."""
        watch(self.timeout, 10)

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Watch the next step."""
        watch(self.timeout, 10 if self._is_first_step else 1)
        self._is_first_step = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()

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
