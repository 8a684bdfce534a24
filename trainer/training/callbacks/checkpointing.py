"""Saves checkpoints at step boundaries, whole or not at all, and removes the old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from trainer.training.checkpoints import BEFORE_DROP, publish, regular_checkpoints, step_file
from trainer.training.config import RunConfig


class Checkpointing(L.Callback):
    """Every ``checkpoint_every`` steps and at the end; keeps the last ``keep_checkpoints``."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.directory = config.trainer, directory

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Save after the last micro-batch of a step that is due."""
        step = trainer.global_step
        due = step % self.config.checkpoint_every == 0 or step == self.config.max_steps
        if due and (index + 1) % self.config.accumulation == 0:
            self.save(trainer, step_file(step))
            for old in regular_checkpoints(self.directory)[: -self.config.keep_checkpoints]:
                old.unlink()

    def before_drop(self, trainer: L.Trainer) -> None:
        """Save the state that the drop is about to change."""
        self.save(trainer, BEFORE_DROP)

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint under a temporary name, then give it its own."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".{name}.partial"
        trainer.save_checkpoint(temporary)
        publish(temporary, self.directory / name)
