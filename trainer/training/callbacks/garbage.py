"""Python's garbage collector, run at the same steps on all ranks."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L

from trainer.training.callbacks.steps import ends_step


def set_modules_aside() -> None:
    """Collect, then exempt all present objects from future collections.

    Imported modules have half a million objects, which cost every collection 0.3 s (AMD EPYC,
    idle).
    """
    gc.collect()
    gc.freeze()


class GarbageCollection(L.Callback):
    """Collection every ``every`` steps and at no other time (None: Python's default).

    A collection delays its rank, and all others wait for it in the next collective. By default,
    some rank collects in nearly every step.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every

    def on_train_start(self, *_: Any) -> None:
        """Collect, and disable automatic collection."""
        if self.every is not None:
            gc.collect()
            gc.disable()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Collect if it is due."""
        if self.every and ends_step(trainer, index) and trainer.global_step % self.every == 0:
            gc.collect()

    def on_train_end(self, *_: Any) -> None:
        """Enable automatic collection again."""
        if self.every is not None:
            gc.enable()

    def on_exception(self, *_: Any) -> None:
        """Enable automatic collection again."""
        self.on_train_end()
