"""The drop at a step of ``transformers.Trainer``, or of a trainer derived from it."""

from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from trainer.common.updates import check_updates, forget_moments, is_share
from trainer.hf.adapters import write_dropped_base
from trainer.hf.rotation import (
    adapters_in,
    check_droppable,
    drop_rotation,
    find_parts,
    is_dropped,
    name_base,
    restore_rotation,
)

logger = logging.get_logger(__name__)

DROPPED = "positions_dropped"
BASE = "dropped_base"
OptimizerState = Literal["keep", "reset"]


class DropPositions(TrainerCallback):
    """Callback of ``transformers.Trainer`` that removes the rotary encoding in mid-run.

    The drop is an entry ``positions_dropped`` of the trainer's log history, which its checkpoints
    hold: a run that resumes behind the drop begins without the encoding, whatever its ``at``, and
    one that resumes before it begins with the encoding. Only later checkpoints compete for
    ``load_best_model_at_end``. Logged learning rates are those of the schedule, without ``rewarm``.
    Adapters of peft that are saved behind the drop name a base without rotation, in
    ``output_dir/dropped_base``.

    Args:
        at: updates before the drop, or a share of all updates between 0 and 1.
        rewarm: updates after the drop over which the learning rate rises linearly to the
            schedule's, or a share of all updates.
        optimizer_state: "reset" forgets the optimizer's moments at the drop; "keep" does not.

    Raises:
        ValueError: at once for another ``at``, ``rewarm`` or policy; before the first update for a
            model that cannot be dropped, or a trainer that also runs a model that rotates.
    """

    def __init__(
        self, at: int | float, rewarm: int | float = 0, optimizer_state: OptimizerState = "reset"
    ) -> None:
        check_updates("DropPositions.at", at)
        check_updates("DropPositions.rewarm", rewarm)
        if optimizer_state not in get_args(OptimizerState):
            raise ValueError(
                f"DropPositions.optimizer_state: expected keep or reset, got {optimizer_state!r}"
            )
        self.at = at
        self.rewarm = rewarm
        self.optimizer_state = optimizer_state
        self.step = 0
        self.rewarm_steps = 0
        self.dropped_at: int | None = None
        self._base: Path | None = None
        self._rates: list[tuple[Any, Any]] = []
        """Scheduled and lowered learning rates of the present update, by parameter group."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the step, and bring the model into the state in which training left it."""
        model = kwargs["model"]
        self.step = _updates(self.at, state.max_steps)
        self.rewarm_steps = _updates(self.rewarm, state.max_steps)
        drops = [int(row[DROPPED]) for row in state.log_history if DROPPED in row]
        self.dropped_at = drops[-1] if drops else None
        if self.dropped_at is None and self.step >= state.max_steps:
            logger.warning("Training ends at update %d, before the drop", state.max_steps)

        if self.dropped_at is None and not (self.step == 0 and is_dropped(model)):
            restore_rotation(model)
        check_droppable(model)
        _check_references(args, model)
        self._base = write_dropped_base(model, Path(str(args.output_dir), BASE))
        if self.dropped_at is not None:
            self._drop(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop at the step; lower the learning rates of an update shortly after it.

        DeepSpeed's engine updates within the backward pass, so the next hook is too late.
        """
        optimizer: Optimizer = kwargs["optimizer"]
        if self.dropped_at is None and state.global_step >= self.step:
            logger.warning("Dropping positional encodings after %d updates", state.global_step)
            self._drop(kwargs["model"])
            self.dropped_at = state.global_step
            state.log_history.append({DROPPED: self.dropped_at, "step": self.dropped_at})
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
            if self.optimizer_state == "reset":
                forget_moments(optimizer)

        self._rates = []
        if self.dropped_at is None or state.global_step >= self.dropped_at + self.rewarm_steps:
            return
        factor = (state.global_step - self.dropped_at + 1) / self.rewarm_steps
        for group in optimizer.param_groups:
            lowered = group["lr"] * factor  # not in place: it may be a tensor
            self._rates.append((group["lr"], lowered))
            group["lr"] = lowered

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put back the schedule's learning rates, which some schedules multiply."""
        groups = kwargs["optimizer"].param_groups
        for group, (scheduled, lowered) in zip(groups, self._rates, strict=False):
            if group["lr"] is lowered:  # otherwise DeepSpeed's schedule has moved on
                group["lr"] = scheduled

    def _drop(self, model: nn.Module) -> None:
        """Drop the rotation, and let adapters name the base without it."""
        drop_rotation(model)
        if self._base is not None:
            name_base(model, str(self._base))


def _updates(number: int | float, max_steps: int) -> int:
    return round(number * max_steps) if is_share(number) else int(number)


def _check_references(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse TRL's trainers that run weights trained without rotation in a model that rotates; warn
    of a reference that loses its rotation."""
    parts = find_parts(model)
    if parts.is_loaded_dropped():
        return
    advice = "drop first: trainer.hf.drop_rotation(model).save_pretrained(directory), load that"
    if getattr(args, "sync_ref_model", False):
        raise ValueError(f"sync_ref_model: the reference rotates, its new weights do not; {advice}")
    if getattr(args, "use_vllm", False):
        raise ValueError(f"use_vllm: the engine rotates, its new weights do not; {advice}")
    has_reference = hasattr(args, "sync_ref_model") and getattr(args, "beta", 0.0) != 0.0
    is_precomputed = getattr(args, "precompute_ref_log_probs", False)
    loses_rotation = bool(adapters_in(model)) and not parts.is_dropped()
    if loses_rotation and has_reference and not is_precomputed:
        logger.warning(
            "The reference is the model with its adapter off, so it loses its rotation, too. "
            "precompute_ref_log_probs=True keeps one that rotates; or %s",
            advice,
        )
