"""Python's cycle collector, run at the same steps on all ranks."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L

from trainer.training.callbacks.steps import ends_step


def set_modules_aside() -> None:
    """Collect, and never look again at what is there: half a million objects of imported modules,
    over which every collection takes 0.3 s (AMD EPYC, idle)."""
    gc.collect()
    gc.freeze()


class GarbageCollection(L.Callback):
    """Collects every ``every`` steps and never in between (None: whenever Python likes).

    A collection stops a rank for a moment, and in a collective all others wait for it: left to
    themselves, some rank collects in nearly every step.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every

    def on_train_start(self, *_: Any) -> None:
        """Collect, and turn the automatic collector off."""
        if self.every is not None:
            gc.collect()
            gc.disable()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Collect where it is due."""
        if self.every and ends_step(trainer, index) and trainer.global_step % self.every == 0:
            gc.collect()

    def on_train_end(self, *_: Any) -> None:
        """Turn the automatic collector on again."""
        if self.every is not None:
            gc.enable()

    def on_exception(self, *_: Any) -> None:
        """Turn it on there too."""
        self.on_train_end()
