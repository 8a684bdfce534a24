"""Checkpoints by steps, by time and before a drop: asynchronous, atomic, and rotated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L

from trainer.checkpoint import BEFORE_DROP, Writer, step_name
from trainer.config import RunConfig
from trainer.runs.ranks import Ranks, Vote
from trainer.training.callbacks.guards import watch
from trainer.training.module import LanguageModule, StepCallback

log = logging.getLogger(__name__)


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
        self.config, self.collect_state = config.trainer, collect_state
        self.permanent_steps = permanent_steps
        self.writer = Writer(
            Path(config.run_dir) / "checkpoints",
            config.trainer.keep_checkpoints,
            config.trainer.keep_every,
            permanent_steps,
        )
        self.clock = CheckpointClock(config.trainer.checkpoint_minutes, ranks.is_rank_zero)
        self.last_saved = 0

    @property
    def seconds(self) -> float:
        """Duration of the last write."""
        return self.writer.seconds

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save a step that is due."""
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
        """Save this step and wait for completion; raise the error of a failed write."""
        if self.last_saved != trainer.global_step:
            self.save(trainer, step_name(trainer.global_step))
        watch(None)
        self.writer.wait()
        watch(self.config.step_timeout)

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Copy the current state and let the background thread write it."""
        module = cast("LanguageModule", trainer.lightning_module)  # typed as the base class
        module.timer.enter("checkpoint")
        watch(None)
        self.wait()
        self.writer.save(name, module.model, trainer.optimizers[0], self.collect_state(trainer))
        self.last_saved = trainer.global_step
        watch(self.config.step_timeout)
        module.timer.enter("data")

    def wait(self) -> None:
        """Wait for the checkpoint being written; log a failure, since older ones are untouched."""
        try:
            self.writer.wait()
        except (OSError, RuntimeError) as error:
            log.warning("A checkpoint could not be written; the run goes on (%s)", error)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Wait for the checkpoint being written; the watchdog is off and stays off."""
        self.wait()
        self.writer.close()


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
