"""Base classes of periodic measurements during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import lightning as L

from trainer.evaluation.results import Json
from trainer.runs.config import RunConfig
from trainer.training.callbacks.steps import begins_step, ends_step
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule


class Monitor(L.Callback, ABC):
    """Measurement every ``every`` steps (or as :meth:`is_due` says).

    Also measures just before and after the drop, and after the last step of every phase. In the
    list of callbacks it follows the transitions and precedes logging and saving.
    """

    def __init__(self, config: RunConfig, every: int, transitions: Transitions) -> None:
        self.config, self.every, self.transitions = config, every, transitions
        self.fixed = {phase.end for phase in transitions.phases}

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether to measure after ``step`` steps, in addition to drops and ends of phases."""
        return step % self.every == 0

    @abstractmethod
    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure the present model."""

    def on_train_batch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Measure directly after the model was changed."""
        if self.transitions.crossed_at(trainer.global_step) and begins_step(trainer, index):
            self.measure(trainer, module)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure after a step that is due."""
        step = trainer.global_step
        due = self.is_due(module, step) or step in self.fixed or module.phase_ended
        if ends_step(trainer, index) and due:
            self.measure(trainer, module)


class Remembering(Monitor):
    """Monitor whose state, ``history``, contains all its measurements, each a ``kind``."""

    kind: ClassVar[type[Json]]

    def __init__(self, config: RunConfig, every: int, transitions: Transitions) -> None:
        super().__init__(config, every, transitions)
        self.history: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """Return all measurements."""
        return {"history": [one.to_dict() for one in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all measurements."""
        self.history = [self.kind.from_dict(one) for one in state_dict["history"]]
