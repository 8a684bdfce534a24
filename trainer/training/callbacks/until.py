"""Early end of a phase, by its held-out loss."""

from __future__ import annotations

import logging
from statistics import fmean
from typing import Any

import lightning as L

from trainer.runs.phases import Phase
from trainer.training.callbacks.checkpointing import Checkpointing
from trainer.training.callbacks.steps import ends_step
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule

log = logging.getLogger(__name__)


class Until(L.Callback):
    """Ends a phase once its held-out loss is flat, or back at its value before the change.

    The loss is measured every ``until.every`` steps; the losses are this callback's state.
    ``ended`` is the phase's number of steps, once it has ended. Rank 0 decides for all.
    """

    def __init__(
        self, phase: Phase, transitions: Transitions, checkpointing: Checkpointing
    ) -> None:
        self.phase, self.transitions, self.checkpointing = phase, transitions, checkpointing
        self.losses: list[float] = []
        self.ended: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of this phase."""
        return {"phase": self.phase.name, "losses": list(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses, unless they belong to another phase."""
        if state_dict["phase"] == self.phase.name:
            self.losses = list(state_dict["losses"])

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure after a step that is due, and end the phase at a checkpoint."""
        until, step = self.phase.until, trainer.global_step
        done = step - self.phase.start
        if until is None or not ends_step(trainer, index) or done % until.every:
            return
        if self.phase.drop is not None and done < self.phase.drop.anneal_steps:
            return  # before the drop is complete the loss does not reflect it
        self.losses.append(fmean(self.transitions.losses(module, self.phase)))
        if step == self.phase.end or not trainer.strategy.broadcast(self._is_over()):
            return
        log.info(
            "Step %d: phase %r ends after %d of %d steps, with a held-out loss of %.3f",
            *(step, self.phase.name, done, self.phase.end - self.phase.start, self.losses[-1]),
        )
        self.ended = done
        self.transitions.measure_end(module, self.phase)
        module.phase_ended = trainer.should_stop = True

    def on_train_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Save the phase's last checkpoint after all other callbacks have seen its last step."""
        if self.ended is not None:
            self.checkpointing.save_now(trainer)

    def _is_over(self) -> bool:
        until = self.phase.until
        assert until is not None
        if until.back_within is not None:
            before = self.transitions.effects[self.phase.name]["loss_before"]
            if self.losses[-1] <= before + until.back_within:
                return True
        if until.flat is None or len(self.losses) <= until.patience:
            return False
        return self.losses[-1 - until.patience] - self.losses[-1] < until.flat
