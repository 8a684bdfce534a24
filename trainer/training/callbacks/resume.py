"""Restores a checkpoint's state into a run that is about to start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from trainer.runs.saved_state import callback_states
from trainer.runs.state import restore
from trainer.training.lightning_internals import set_steps_done
from trainer.training.module import LanguageModule
from trainer.training.user_callbacks import load_states

log = logging.getLogger(__name__)


class Resume(L.Callback):
    """Restores weights, optimizer, counters and the states of other callbacks.

    The data loader starts at the right step, so Lightning's loops start from zero and need only the
    number of updates done.
    """

    def __init__(
        self,
        checkpoint: Path | None,
        state: dict[str, Any],
        callbacks: Sequence[L.Callback],
        user_callbacks: Sequence[L.Callback] = (),
    ) -> None:
        self.checkpoint, self.state = checkpoint, state
        self.callbacks, self.user_callbacks = callbacks, user_callbacks

    def on_fit_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Restore after model and optimizer are on their devices."""
        if self.checkpoint is None:
            return
        restore(module.model, trainer.optimizers[0], self.checkpoint)
        module.tally.load(self.state["tally"], module.device)
        module.certificate.load(self.state["certificate"])
        states = callback_states(self.state)
        for callback in self.callbacks:
            # A monitor may be new in this command.
            if (name := type(callback).__name__) in states:
                callback.load_state_dict(states[name])
        unused = load_states(self.user_callbacks, self.state.get("user_callbacks", {}))
        if unused:
            log.warning(
                "The checkpoint holds states of callbacks that this command does not have: %s",
                ", ".join(unused),
            )
        set_steps_done(trainer, self.state["step"])
