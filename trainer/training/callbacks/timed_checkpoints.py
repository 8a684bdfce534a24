"""Checkpoints by time, in addition to those by steps."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

from trainer.runs.checkpoints import step_name
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks.checkpointing import Checkpointing
from trainer.training.callbacks.steps import ends_step
from trainer.training.callbacks.votes import Vote


class TimedCheckpoints(L.Callback):
    """Saves a checkpoint ``trainer.checkpoint_minutes`` after the previous one.

    Clocks of ranks differ: rank 0 decides, and all save after the step at which they know of it.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, checkpointing: Checkpointing) -> None:
        self.minutes = config.trainer.checkpoint_minutes
        self.checkpointing, self._decides = checkpointing, ranks.is_rank_zero
        self._vote, self._asked = Vote(), False
        self._saved = 0, time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Save if it is time."""
        step = trainer.global_step
        if self.minutes is None or not ends_step(trainer, index) or step == trainer.max_steps:
            return
        if self.checkpointing.last_saved != self._saved[0]:
            self._saved = self.checkpointing.last_saved, time.monotonic()
        due = self._decides and time.monotonic() - self._saved[1] >= 60 * self.minutes
        self._asked = due and not self._asked  # the previous step's vote may still be under way
        if self._vote.agreed(self._asked) and self.checkpointing.last_saved != step:
            self.checkpointing.save(trainer, step_name(step))
            self._asked, self._saved = False, (step, time.monotonic())
