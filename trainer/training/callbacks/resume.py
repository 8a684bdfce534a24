"""Puts a checkpoint's state into a run that is about to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from trainer.runs.state import restore
from trainer.training.module import LanguageModule


class Resume(L.Callback):
    """Restores weights, optimizer, counters and the states of other callbacks.

    The loader is made from its first step on, so Lightning's loops begin anew; all they must know
    is the number of updates done.
    """

    def __init__(
        self, checkpoint: Path | None, state: dict[str, Any], callbacks: tuple[L.Callback, ...]
    ) -> None:
        self.checkpoint, self.state, self.callbacks = checkpoint, state, callbacks

    def on_fit_start(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Restore, once model and optimizer are where they belong."""
        if self.checkpoint is None:
            return
        restore(module.model, trainer.optimizers[0], self.checkpoint)
        module.tally.load(self.state["tally"], module.device)
        for callback in self.callbacks:
            # A monitor may have come with this command.
            if (name := type(callback).__name__) in self.state["callbacks"]:
                callback.load_state_dict(self.state["callbacks"][name])
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.state["step"]
