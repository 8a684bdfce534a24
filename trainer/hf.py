"""The drop for models of transformers, in anybody's training loop.

:func:`drop_rotation` sets the rotary frequencies of a model to zero where it stands;
:class:`DropPositions` does so at a step of ``transformers.Trainer`` or a trainer derived from it.
Neither needs anything else of this package.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)
DROPPED = "positions_dropped"
# transformers has no rope_type for "no rotation". Llama 3's divides all frequencies with
# wavelengths above original_max_position_embeddings / low_freq_factor by its factor, until no
# product differs from 0. Every wavelength is above it, at least 2 pi, also for 8192, which
# llama.cpp's converter takes as the original length of a file that does not name one beside the
# parameters.
NO_ROTATION: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 1e30,
    "low_freq_factor": 8192.0,
    "high_freq_factor": 16384.0,
    "original_max_position_embeddings": 2,
}


def drop_rotation(model: Model) -> Model:
    """Remove the rotary encoding from all layers of ``model``, in place, and return it.

    Its configurations then say so too: what ``save_pretrained`` writes, transformers loads natively
    and computes alike. ``model`` may be wrapped (DDP, a LightningModule). Tried with Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, SmolLM3, OLMo 2, Phi-3 and Granite.

    Raises:
        ValueError: no module of the model has rotary frequencies.
    """
    for module, frequencies in rotating_modules(model):
        for buffer in frequencies:
            buffer.zero_()
        for name in vars(module):
            if name.endswith("attention_scaling"):
                setattr(module, name, 1.0)
        # Dynamic types recompute frequencies in the forward pass.
        kind = getattr(module, "rope_type", None)
        fixed = dict.fromkeys(kind, "llama3") if isinstance(kind, dict) else "llama3"
        setattr(module, "rope_type", fixed)  # noqa: B010  mypy takes attributes for modules
        pairs = len(frequencies[0])
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if old := getattr(config, "rope_parameters", None):
            new = NO_ROTATION if config.model_type != "phi3" else _long_factors(pairs)
            is_by_layer_type = isinstance(next(iter(old.values())), dict)
            config.rope_parameters = (
                {kind: _kept(of_kind) | new for kind, of_kind in old.items()}
                if is_by_layer_type
                else _kept(old) | new
            )
    return model


def rotating_modules(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """Return the modules of ``model`` that hold rotary frequencies, and these buffers.

    Raises:
        ValueError: there is none.
    """
    found = [
        (module, buffers)
        for module in model.modules()
        if (
            buffers := [x for n, x in module.named_buffers(recurse=False) if n.endswith("inv_freq")]
        )
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no rotary frequencies (inv_freq)")
    return found


def _kept(old: dict[str, Any]) -> dict[str, Any]:
    names = "rope_theta", "partial_rotary_factor"
    return {"rope_theta": 1e4} | {name: old[name] for name in names if name in old}


def _long_factors(pairs: int) -> dict[str, Any]:
    """Return parameters of LongRoPE without rotation: Phi-3 takes no other type."""
    slow = [NO_ROTATION["factor"]] * pairs
    return {
        "rope_type": "longrope",
        "short_factor": slow,
        "long_factor": slow,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 4096,
    }


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
        rotating_modules(kwargs["model"])  # raises now rather than at the drop
        self.step, self.rewarm_steps = (
            round(number * state.max_steps if number < 1 else number)
            for number in (self.at, self.rewarm)
        )
        drops = (int(row[DROPPED]) for row in state.log_history if DROPPED in row)
        self.dropped_at = next(drops, None)
        if self.dropped_at is not None:
            drop_rotation(kwargs["model"])
        elif self.step >= state.max_steps:
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
