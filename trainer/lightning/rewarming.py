"""Learning rates that are lower in a step alone, so that no schedule sees it."""

from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

SCHEDULED = "scheduled_lr"
"""Key of a parameter group that holds the schedule's learning rate during a step."""


class Rewarming:
    """Multiplies the learning rates of all optimizers by ``factor`` within each step.

    A step's closure runs the module, which may set learning rates. So :meth:`lower` follows at the
    closure's end, or before the step where a gradient scaler calls it without one.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._hooks: list[RemovableHandle] = []

    def start(self, trainer: L.Trainer) -> None:
        """Begin to lower and put back the learning rates of a trainer."""
        for optimizer in trainer.optimizers:
            if trainer.scaler is not None:
                self._hooks.append(optimizer.register_step_pre_hook(self.lower))
            self._hooks.append(optimizer.register_step_post_hook(put_back))

    def before_step(self, trainer: L.Trainer, optimizer: Optimizer) -> None:
        """Lower the learning rates at the end of a step's closure."""
        if trainer.scaler is None:  # a scaler may skip the step, and nothing would put them back
            self.lower(optimizer)

    def lower(self, optimizer: Optimizer, *_: Any) -> None:
        """Lower the learning rates of a step."""
        if self.factor == 1:
            return
        for group in optimizer.param_groups:
            scheduled = group.setdefault(SCHEDULED, group["lr"])
            # Not in place: a rate may be a tensor. Of several callbacks the lowest rate counts.
            group["lr"] = min(group["lr"], scheduled * self.factor)

    def end(self, trainer: L.Trainer) -> None:
        """Remove the hooks: the module may keep its optimizers for another fit."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in trainer.optimizers:
            put_back(optimizer)


def put_back(optimizer: Optimizer, *_: Any) -> None:
    """Put back the learning rates of the schedule after a step."""
    for group in optimizer.param_groups:
        if SCHEDULED in group:
            group["lr"] = group.pop(SCHEDULED)
