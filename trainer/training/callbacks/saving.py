"""Checkpoints by steps, by time and before a drop: asynchronous, atomic, and rotated."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from trainer.common.errors import UserError, first_line
from trainer.common.files import write_durably
from trainer.common.words import same_command
from trainer.runs.checkpoints import (
    BEFORE_DROP,
    digests,
    rotate,
    step_name,
    write_manifest_and_rename,
)
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks, Vote, all_gather, on_rank_zero
from trainer.runs.saved_state import STATE
from trainer.runs.state import Tensors, save, tensors_of
from trainer.training.callbacks.guards import watch
from trainer.training.module import LanguageModule, StepCallback

log = logging.getLogger(__name__)


SLOW_DISK = 7200.0
"""Seconds that a checkpoint may take to be written."""


class Saving(StepCallback):
    """Saves a checkpoint every ``checkpoint_every`` steps, by time, and at the end.

    Tensors are copied at the step boundary and written by a background thread, one checkpoint at a
    time. If a checkpoint cannot be written, for instance to a full disk, a warning is logged and
    training continues; only the last one must succeed. Checkpoints of ``permanent_steps`` are never
    removed. ``collect_state`` returns the contents of ``state.json``.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        collect_state: Callable[[L.Trainer], dict[str, Any]],
        permanent_steps: frozenset[int] = frozenset(),
    ) -> None:
        self.config, self.directory = config.trainer, Path(config.run_dir) / "checkpoints"
        self.collect_state, self.permanent_steps = collect_state, permanent_steps
        self._command = same_command(config.overwrite)
        self.clock = CheckpointClock(config.trainer.checkpoint_minutes, ranks.is_rank_zero)
        self.last_saved = 0
        self.seconds = 0.0  # duration of the last write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[str, Future[None]] | None = None
        self._problem: str | None = None  # of the last checkpoint that was written
        self._stager: tuple[frozenset[str], BlockingAsyncStager] | None = None
        # The thread needs its own group: its collectives would mix with training's.
        self._group = (
            group_of_threads(dist.group.WORLD, SLOW_DISK) if dist.is_initialized() else None
        )

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save a step that is due."""
        if self._in_flight and self._in_flight[1].done():
            self.finish()
        step = trainer.global_step
        if step == self.config.max_steps:
            self.save_now(trainer)
            return
        if step % self.config.checkpoint_every == 0 or step in self.permanent_steps:
            self.save(trainer, step_name(step))
        if self.clock.is_due(step, self.last_saved):
            self.save(trainer, step_name(step))

    def before_drop(self, trainer: L.Trainer) -> None:
        """Save the state that the drop is about to change."""
        self.save(trainer, BEFORE_DROP)

    def save_now(self, trainer: L.Trainer) -> None:
        """Save this step and wait for completion.

        Raises:
            UserError: the checkpoint could not be written.
        """
        step = trainer.global_step
        if self.last_saved != step:
            self.save(trainer, step_name(step))
        if (problem := self.finish()) is not None:
            raise UserError.at(
                "checkpoint",
                f"step {step} could not be written ({problem}); {self._command} goes on from the "
                "newest checkpoint that could.",
                transient=True,
            )

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Copy the current state and let the background thread write it."""
        module = cast("LanguageModule", trainer.lightning_module)  # typed as the base class
        module.timer.enter("checkpoint")
        self.finish()
        state = self.collect_state(trainer)
        tensors = self._staged(tensors_of(module.model, trainer.optimizers[0]))
        self.last_saved = trainer.global_step
        device = trainer.strategy.root_device
        work = self._thread.submit(self._write_beside, device, tensors, state, name)
        self._in_flight, self._problem = (name, work), None
        if not self.config.async_checkpoint:
            self.finish()
        module.timer.enter("data")

    def _write_beside(self, device: torch.device, *checkpoint: Any) -> None:
        if device.type == "cuda":  # the current device is per thread, initially GPU 0
            torch.cuda.set_device(device)
        self._write(*checkpoint)

    def finish(self) -> str | None:
        """Wait for the checkpoint being written; return the error of the last one, or None.

        The watchdog allows :data:`SLOW_DISK` for it if that is longer than a step.
        """
        if self._in_flight is None:
            return self._problem
        if (timeout := self.config.step_timeout) is not None:
            watch(max(timeout, SLOW_DISK))
        problem = self._wait()
        watch(timeout)
        return problem

    def _wait(self) -> str | None:
        if self._in_flight is None:
            return self._problem
        name, work = self._in_flight
        self._in_flight = None
        try:
            work.result()
        except (OSError, RuntimeError, CheckpointException, UserError) as error:
            self._problem = reason(error).rstrip(".")
            log.warning(
                "Checkpoint %s could not be written (%s); the run goes on, older checkpoints are "
                "untouched",
                name,
                self._problem,
            )
        return self._problem

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Wait for the checkpoint being written; the watchdog is off and stays off."""
        self._wait()
        self._thread.shutdown()

    def _staged(self, tensors: Tensors) -> Tensors:
        """Copy to the CPU, for GPU tensors into the same pinned memory every time."""
        names = frozenset(tensors)
        if self._stager is None or self._stager[0] != names:
            self._stager = names, BlockingAsyncStager(torch.cuda.is_available())
        return self._stager[1].stage(tensors)

    def _write(self, tensors: Tensors, state: dict[str, Any], name: str) -> None:
        partial, rank, began = self.directory / f".{name}.partial", 0, time.monotonic()
        if self._group is not None:
            rank = dist.get_rank()
        try:
            # before any rank creates it
            on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True), self._group)
            save(tensors, partial, self._group)
            parts = all_gather(digests(partial, f"__{rank}_*"), self._group)

            def complete() -> None:
                write_durably(partial / STATE, json.dumps(state).encode())
                files = {k: v for part in parts for k, v in part.items()}
                files |= digests(partial, STATE) | digests(partial, ".metadata")
                write_manifest_and_rename(partial, self.directory / name, files)
                rotate(self.directory, self.config, self.permanent_steps)

            # wait for a slow disk here, not in a collective of the next step
            on_rank_zero(complete, self._group)
            self.seconds = time.monotonic() - began
        except BaseException:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise


class CheckpointClock:
    """Decides when a checkpoint is due ``minutes`` after the previous one (None: never).

    Clocks of ranks differ: rank 0 decides, and all save after the step at which they know of it.
    """

    def __init__(self, minutes: float | None, decides: bool) -> None:
        self.minutes, self._decides = minutes, decides
        self._vote, self._voted = Vote(), False
        self._saved = 0, time.monotonic()  # step and time

    def is_due(self, step: int, last_saved: int) -> bool:
        """Whether to save after ``step``; all ranks call this together after every step."""
        if self.minutes is None:
            return False
        if last_saved != self._saved[0]:
            self._saved = last_saved, time.monotonic()
        due = self._decides and time.monotonic() - self._saved[1] >= 60 * self.minutes
        self._voted = due and not self._voted  # the previous step's vote may still be under way
        if not self._vote.agreed(self._voted) or last_saved == step:
            return False
        self._voted, self._saved = False, (step, time.monotonic())
        return True


def reason(error: BaseException) -> str:
    """Return the first line of an error; for one that DCP wraps, of its cause."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


@lru_cache(maxsize=1)
def group_of_threads(world: object, seconds: float) -> dist.ProcessGroup:
    """Create the thread's process group once for all stretches and controls of a job.

    ``world`` distinguishes several jobs in one process.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
