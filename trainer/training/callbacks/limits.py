"""Timeouts of collectives, before and after the first step."""

from __future__ import annotations

from typing import Any

import lightning as L

from trainer.runs.config import RunConfig
from trainer.runs.ranks import limit_collectives
from trainer.training.callbacks.steps import ends_step


class Limits(L.Callback):
    """Timeouts of collectives: ``strategy.timeouts.collective`` after the first step, which may
    compile.

    ``strategy.timeouts.start`` applies before it and again after the last step.
    """

    def __init__(self, config: RunConfig) -> None:
        self.timeouts = config.strategy.timeouts
        self._first = True

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Shorten the timeout at the end of the first step."""
        if self._first and ends_step(trainer, index):
            self._first = False
            limit_collectives(self.timeouts.collective)

    def on_train_end(self, *_: Any) -> None:
        """Restore the longer timeout."""
        limit_collectives(self.timeouts.start)
