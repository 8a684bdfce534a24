"""The drop at a step of ``transformers.Trainer``, or of a trainer derived from it."""

from __future__ import annotations

from typing import Any, Literal

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from trainer.hf.rotation import check_droppable, drop_rotation, restore_rotation

logger = logging.get_logger(__name__)

DROPPED = "positions_dropped"


class DropPositions(TrainerCallback):
    """Callback of ``transformers.Trainer`` that removes the rotary encoding in mid-run.

    The drop is an entry ``positions_dropped`` of the trainer's log history, which its checkpoints
    hold: a run that resumes behind the drop begins without the encoding, whatever its ``at``. Only
    later checkpoints compete for ``load_best_model_at_end``. Logged learning rates are those of the
    schedule, without ``rewarm``.

    Args:
        at: updates before the drop; below 1 a share of ``max_steps``.
        rewarm: updates after the drop over which the learning rate rises linearly to the
            schedule's; below 1 a share of ``max_steps``.
        optimizer_state: "reset" forgets the optimizer's moments at the drop; "keep" does not.

    Raises:
        ValueError: at once for a negative ``at`` or another policy.
    """

    def __init__(
        self,
        at: int | float,
        rewarm: int | float = 0,
        optimizer_state: Literal["keep", "reset"] = "keep",
    ) -> None:
        if min(at, rewarm) < 0 or optimizer_state not in ("keep", "reset"):
            raise ValueError(f"DropPositions: {at=}, {rewarm=}, {optimizer_state=}")
        self.at = at
        self.rewarm = rewarm
        self.optimizer_state = optimizer_state
        self.dropped_at: int | None = None
        self._scheduled: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the step; drop already in a run that resumes behind the drop."""
        check_droppable(kwargs["model"])
        self.step, self.rewarm_steps = (
            round(number * state.max_steps if number < 1 else number)
            for number in (self.at, self.rewarm)
        )
        drops = (int(row[DROPPED]) for row in state.log_history if DROPPED in row)
        self.dropped_at = next(drops, None)
        if self.dropped_at is not None:
            drop_rotation(kwargs["model"])
        else:
            restore_rotation(kwargs["model"])
        if self.dropped_at is None and self.step >= state.max_steps:
            logger.warning("Training ends at update %d, before the drop", state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop at the step."""
        if self.dropped_at is None and state.global_step >= self.step:
            logger.warning("Dropping positional encodings after %d updates", state.global_step)
            drop_rotation(kwargs["model"])
            self.dropped_at = state.global_step
            state.log_history.append({DROPPED: self.dropped_at, "step": self.dropped_at})
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
            if self.optimizer_state == "reset":
                kwargs["optimizer"].state.clear()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lower the learning rate of an update shortly after the drop."""
        groups = kwargs["optimizer"].param_groups
        self._scheduled = [group["lr"] for group in groups]
        if self.dropped_at is None:
            return
        since = state.global_step - self.dropped_at
        for group in groups if since < self.rewarm_steps else ():
            group["lr"] *= (since + 1) / self.rewarm_steps

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put back the schedule's learning rate, which some schedules multiply."""
        for group, lr in zip(kwargs["optimizer"].param_groups, self._scheduled, strict=True):
            group["lr"] = lr
