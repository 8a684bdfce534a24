"""Rewind to a checkpoint after divergence, and end of a process that hangs."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L

from trainer.common.files import write_atomically
from trainer.runs.config import RunConfig
from trainer.training.callbacks.steps import begins_step, ends_step
from trainer.training.module import LanguageModule

log = logging.getLogger(__name__)


class Rewind(L.Callback):
    """Stops the run if ``trainer.rewind_after`` updates in a row were skipped.

    The run then resumes from its last checkpoint before them and skips the samples since.
    ``broken`` holds the last sound step and the step of the stop. The count is read together with
    the metrics, so that it causes no further host sync.
    """

    def __init__(self, config: RunConfig) -> None:
        self.limit = config.trainer.rewind_after
        self.log_every = config.trainer.log_every
        self.broken: tuple[int, int] | None = None

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Check the count every ``log_every`` steps."""
        step = trainer.global_step
        if self.limit is None or not ends_step(trainer, index) or step % self.log_every:
            return
        in_a_row = module.tally.skipped_in_a_row()
        if in_a_row >= self.limit:
            self.broken = step - in_a_row, step
            log.warning(
                "Step %d: %d updates in a row had no finite loss and gradient; going back",
                step,
                in_a_row,
            )
            trainer.should_stop = True


def watch(timeout: float | None, times: int = 1) -> None:
    """End the process with the stacks of all threads, unless called again within ``times``
    timeouts.

    The timeout is in seconds; None disables the watchdog.
    """
    if timeout is not None:
        faulthandler.dump_traceback_later(
            times * timeout, exit=True, file=sys.__stderr__ or sys.stderr
        )


class Watchdog(L.Callback):
    """Ends a process that hangs, with the stacks of all its threads, and writes a heartbeat.

    A step that takes longer than ``trainer.step_timeout`` seconds has lost a rank, a file system or
    a device, and would wait until the end of the job. The first step, which may compile, has ten
    times as long. ``heartbeat.json`` contains the last step and the time of its end.
    """

    def __init__(self, config: RunConfig, directory: Path, is_rank_zero: bool) -> None:
        self.timeout = config.trainer.step_timeout
        self.log_every = config.trainer.log_every
        self.heartbeat = directory / "heartbeat.json" if is_rank_zero else None
        self.failed = False  # whether the last write failed

    def on_train_start(self, *_: Any) -> None:
        """Watch the first step."""
        self._arm(10)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        """Watch the next step."""
        if begins_step(trainer, index) and index:
            self._arm(1)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Write the heartbeat."""
        step = trainer.global_step
        due = step % self.log_every == 0 or step == trainer.max_steps
        if self.heartbeat and ends_step(trainer, index) and due:
            beat = {"step": step, "time": time.time(), "pid": os.getpid()}
            try:
                write_atomically(self.heartbeat, json.dumps(beat))
            except OSError as error:  # a full disk stops no run
                if not self.failed:
                    log.warning("%s: %s; the run goes on", self.heartbeat.name, error.strerror)
                self.failed = True
            else:
                self.failed = False

    def on_train_end(self, *_: Any) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()

    def on_exception(self, *_: Any) -> None:
        """Stop watching after an error."""
        self.on_train_end()

    def _arm(self, times: int) -> None:
        watch(self.timeout, times)
