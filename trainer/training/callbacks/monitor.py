"""What periodic measurements during training have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning as L

from trainer.runs.config import RunConfig
from trainer.training.callbacks.drop import Drop
from trainer.training.callbacks.steps import begins_step, ends_step
from trainer.training.module import LanguageModule


class Monitor(L.Callback, ABC):
    """Measures every ``every`` steps, just before and just after the drop, and after the last step.

    In the list of callbacks it comes after the drop, and before those that log and save.
    """

    def __init__(self, config: RunConfig, every: int, drop: Drop) -> None:
        self.config, self.every, self.drop = config, every, drop

    @abstractmethod
    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure the model as it is now."""

    def on_train_batch_start(
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Measure just after the drop."""
        crossed = self.drop.effect.get("step") == trainer.global_step
        if crossed and begins_step(trainer, index):
            self.measure(trainer, module)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure after a step that is due."""
        step, fixed = trainer.global_step, (self.config.drop_step, self.config.trainer.max_steps)
        if ends_step(trainer, index) and (step % self.every == 0 or step in fixed):
            self.measure(trainer, module)
