"""How long ranks wait for each other in collectives, before the first step and after it."""

from __future__ import annotations

from typing import Any

import lightning as L

from trainer.runs.config import RunConfig
from trainer.runs.ranks import limit_collectives
from trainer.training.callbacks.steps import ends_step


class Limits(L.Callback):
    """``strategy.timeouts.collective`` once the first step, which may compile, is done on all
    ranks; ``strategy.timeouts.start`` again after the last one."""

    def __init__(self, config: RunConfig) -> None:
        self.timeouts = config.strategy.timeouts
        self._first = True

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Shorten the limit at the end of the first step."""
        if self._first and ends_step(trainer, index):
            self._first = False
            limit_collectives(self.timeouts.collective)

    def on_train_end(self, *_: Any) -> None:
        """Put it back, for what comes next."""
        limit_collectives(self.timeouts.start)
