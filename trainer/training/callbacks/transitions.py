"""Changes of the model between two phases: drops, rescalings, QK-norm, a fresh optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import lightning as L
import torch
from torch import Tensor

from trainer.data.dataset import Batch
from trainer.model.attention import RMSNorm
from trainer.model.config import ModelConfig
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.recalibration.drop import dropped_layout, shrunk
from trainer.recalibration.gain import input_sizes, set_gains
from trainer.runs.phases import Phase, phase_at
from trainer.runs.ranks import all_gather
from trainer.training.callbacks.evaluating import evaluating
from trainer.training.callbacks.steps import begins_step, ends_step
from trainer.training.module import LanguageModule

log = logging.getLogger(__name__)


class Transitions(L.Callback):
    """Changes the model at the first step of a phase: layout, QK-norm, optimizer state.

    The effect of a change is measured on one fixed held-out batch of the phase's length: just
    before, just after, and at the end of the phase. ``effects`` by phase are this callback's state.
    A resumed run keeps them and repeats no change; the layout itself comes with the checkpoint. A
    drop in several steps also keeps the layout from before it.
    """

    def __init__(
        self,
        phases: tuple[Phase, ...],
        effect_batch: Callable[[Phase], Batch],
        before_drop: Callable[[L.Trainer], None],
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        self.phases, self.effect_batch = phases, effect_batch
        self.before_drop, self.add_metrics = before_drop, add_metrics
        self.effects: dict[str, dict[str, Any]] = {}
        self._before: Layout | None = None
        self._batch: tuple[str, Batch] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the effects of changes, and the layout of a drop in progress."""
        before = None if self._before is None else self._before.to_dict()
        return {"effects": dict(self.effects), "before": before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the effects of changes."""
        self.effects = dict(state_dict["effects"])
        before = state_dict.get("before")
        self._before = None if before is None else Layout.from_dict(before)

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.drop and phase.name in self.effects for phase in self.phases)

    def crossed_at(self, step: int) -> bool:
        """Whether the model was changed after ``step`` steps."""
        return any(effect["step"] == step for effect in self.effects.values())

    def on_train_batch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Change the model before the first batch of a phase; a gradual drop, before every step."""
        if not begins_step(trainer, index):
            return
        phase = phase_at(self.phases, trainer.global_step)
        if phase.start == trainer.global_step and phase.name not in self.effects:
            self._enter(trainer, module, phase)
        if self._before is not None and phase.drop is not None:
            self._shrink(module, phase, trainer.global_step + 1 - phase.start)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure the effect at the last step of a phase."""
        if not ends_step(trainer, index):
            return
        phase = phase_at(self.phases, trainer.global_step - 1)
        if trainer.global_step == phase.end:
            self.measure_end(module, phase)

    def measure_end(self, module: LanguageModule, phase: Phase) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        effect = self.effects.get(phase.name)
        if effect is None:
            return
        losses = self.losses(module, phase)
        effect["loss_end"] = fmean(losses)
        effect["sequences"] = effect.get("sequences", {}) | {"end": losses}
        what = "recalibration" if phase.drop else f"phase {phase.name!r}"
        step, loss = module.trainer.global_step, effect["loss_end"]
        log.info("Step %d: held-out loss %.3f at the end of %s", step, loss, what)
        self.add_metrics({f"{_key(phase)}/loss_end": effect["loss_end"]})

    def _enter(self, trainer: L.Trainer, module: LanguageModule, phase: Phase) -> None:
        longer = phase.config.data.sequence_length > module.model.layout.training_length
        if not phase.changes and not longer:
            return
        if phase.drop and not self.has_dropped:
            self.before_drop(trainer)
        before = self.losses(module, phase)
        model, layout = module.model, module.model.layout
        if phase.drop is not None and phase.drop.qk_norm_gain == "matched":
            self._match_gains(module, phase)
        model.layout = layout_of_phase(model.layout, phase, model.config)
        if phase.drop is not None:
            self._before = model.layout if phase.drop.anneal_steps else None
        # A new encoding may need another kernel: ALiBi has a mask, which cuDNN must not see.
        choice = module.choose_attention(phase.config, trainer.strategy.root_device.type)
        torch.backends.cuda.enable_cudnn_sdp(choice.cudnn)
        after = self.losses(module, phase)
        effect = self.effects[phase.name] = {
            "step": trainer.global_step,
            "what": describe(phase, layout),
            "loss_before": fmean(before),
            "loss_after": fmean(after),
            "sequences": {"before": before, "after": after},
        }
        self._reset_optimizer(trainer, module, phase)
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            trainer.global_step,
            effect["what"],
            effect["loss_before"],
            effect["loss_after"],
        )
        losses = ("loss_before", "loss_after")
        self.add_metrics({f"{_key(phase)}/{key}": effect[key] for key in losses})

    def _match_gains(self, module: LanguageModule, phase: Phase) -> None:
        if module.model.config.qk_norm.when != "after_drop":
            return
        with evaluating(module):
            batches = [ids for ids, _ in self._micro_batches(module, phase)]
            sizes = input_sizes(module.model, batches)
        set_gains(sizes)

    def _shrink(self, module: LanguageModule, phase: Phase, done: int) -> None:
        assert self._before is not None
        assert phase.drop is not None
        module.model.layout = shrunk(self._before, phase.drop, done)
        if done >= phase.drop.anneal_steps:
            self._before = None

    def _reset_optimizer(self, trainer: L.Trainer, module: LanguageModule, phase: Phase) -> None:
        policy, (optimizer,) = phase.optimizer_state, trainer.optimizers
        if policy == "reset":
            optimizer.state.clear()
        elif policy == "reset_new" and module.model.config.qk_norm.when == "after_drop":
            for name, submodule in module.model.named_modules():
                if isinstance(submodule, RMSNorm) and name.endswith(("q_norm", "k_norm")):
                    optimizer.state.pop(submodule.weight, None)

    def losses(self, module: LanguageModule, phase: Phase) -> list[float]:
        """Return the loss of each sequence in the fixed batch."""
        rank, ranks = module.ranks.rank, module.ranks.world_size
        with evaluating(module) as model:
            parts = self._micro_batches(module, phase, ranks)
            if len(parts) % ranks:  # with fewer sequences than ranks, each rank reads all of them
                rank, ranks = 0, 1
            own = [model.token_losses(*x).mean(dim=1) for x in parts[rank::ranks]]
            mine = torch.stack(own).tolist()
        of_ranks = [mine] if ranks == 1 else all_gather(mine)
        return [loss for row in zip(*of_ranks, strict=True) for part in row for loss in part]

    def _micro_batches(
        self, module: LanguageModule, phase: Phase, shared: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Split the fixed batch, inputs and targets, into parts of one size.

        Parts are no larger than training's micro-batches. If possible, each of the ranks that share
        the parts gets the same number.
        """
        if self._batch is None or self._batch[0] != phase.name:
            self._batch = phase.name, self.effect_batch(phase)
        batch = self._batch[1]
        ids, labels = (x.to(module.device) for x in (batch["input_ids"], batch["labels"]))
        run, ranks = phase.config.trainer, module.ranks.world_size
        largest = run.batch_size // (run.accumulation(ranks) * ranks)
        fit = [n for n in range(-(-len(ids) // largest), len(ids) + 1) if len(ids) % n == 0]
        parts = next((n for n in fit if n % shared == 0), fit[0])
        return list(zip(ids.chunk(parts), labels.chunk(parts), strict=True))


def layout_of_phase(layout: Layout, phase: Phase, model: ModelConfig) -> Layout:
    """Return the layout that a phase begins with: the previous one, dropped or rescaled, and
    extended.

    A drop in several steps has made none. A new encoding is written for the length that it is
    trained on; a rescaling starts from the length before.
    """
    longest = max(layout.training_length, phase.config.data.sequence_length)
    if phase.drop is None and phase.rescale is not None:
        layout = rescaled_layout(layout, phase)
    layout = replace(layout, training_length=longest)
    if phase.drop is not None:
        norms_on = model.qk_norm.when == "after_drop"
        positional = phase.config.positional
        layout = dropped_layout(layout, positional, phase.drop, model.head_size, norms_on)
    return layout


def rescaled_layout(layout: Layout, phase: Phase) -> Layout:
    """Return the layout of a run whose phase rescales its frequencies."""
    assert phase.rescale is not None
    reach = phase.config.data.sequence_length / layout.training_length
    factor = phase.rescale.factor or max(reach, 1.0)
    return layout.rescaled(RESCALINGS[phase.rescale.method], factor, phase.rescale.layers)


def describe(phase: Phase, layout: Layout | None = None) -> str:
    """Describe the changes at the start of a phase; ``layout``: the one before it, if known."""
    if phase.drop is not None:
        steps = phase.drop.anneal_steps
        over = f" over {steps} steps" if steps else ""
        return f"dropped the encoding ({phase.drop.to}){phase.drop.of_what}{over}"
    if (rescale := phase.rescale) is not None:
        layers = None if layout is None else layout.rotating(rescale.layers)
        if layout is None or layers == layout.rotating("all"):
            where = ""
        else:
            where = f", layers {', '.join(map(str, layers or ()))}"
        if layers != []:
            return f"frequencies rescaled for longer sequences ({rescale.method}{where})"
    length = phase.config.data.sequence_length
    return f"phase {phase.name!r} with sequences of {length:,} tokens"


def _key(phase: Phase) -> str:
    """Return the prefix of a phase's metrics."""
    return "drop" if phase.drop else f"phase_{phase.name}"
