"""The callback that drops the encoding in mid-run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import fmean
from typing import Any

import lightning as L
import torch
from torch import Tensor

from trainer.data.dataset import Batch
from trainer.model.attention import RMSNorm
from trainer.recalibration.drop import dropped_layout
from trainer.recalibration.gain import input_sizes, set_gains
from trainer.runs.config import RunConfig
from trainer.training.callbacks.evaluating import evaluating
from trainer.training.callbacks.steps import ends_step
from trainer.training.module import LanguageModule

log = logging.getLogger(__name__)


class Drop(L.Callback):
    """At step ``config.drop_step``: another layout, QK-norm, a new optimization phase.

    What the drop did is measured on one fixed held-out batch just before, just after and at the
    end. ``effect`` is this callback's state; a run that resumes after the drop keeps it and does
    not drop again, and the layout itself comes with the checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        effect_batch: Batch,
        before_drop: Callable[[L.Trainer], None],
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        self.config, self.effect_batch = config, effect_batch
        self.before_drop, self.add_metrics = before_drop, add_metrics
        self.effect: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What the drop did, empty before it."""
        return dict(self.effect)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember that it happened."""
        self.effect = dict(state_dict)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Drop before the first batch of the new phase."""
        if trainer.global_step == self.config.drop_step and not self.effect:
            self.before_drop(trainer)
            self._drop(trainer, module)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure at the last step where the loss has come to."""
        last = ends_step(trainer, index)
        if self.effect and last and trainer.global_step == self.config.trainer.max_steps:
            losses = self._losses(module)
            loss = fmean(losses)
            self.effect["loss_end"] = loss
            self.effect["sequences"] = self.effect.get("sequences", {}) | {"end": losses}
            log.info(
                "Step %d: held-out loss %.3f at the end of recalibration", trainer.global_step, loss
            )
            self.add_metrics({"drop/loss_end": loss})

    def _drop(self, trainer: L.Trainer, module: LanguageModule) -> None:
        model, settings = module.model, self.config.drop
        before = self._losses(module)
        matched = settings.qk_norm_gain == "matched"
        norms_on = model.config.qk_norm.when == "after_drop"
        if norms_on and matched:
            with evaluating(module):
                sizes = input_sizes(model, [ids for ids, _ in self._micro_batches(module)])
            set_gains(sizes)
        model.layout = dropped_layout(
            model.layout, self.config.positional, settings, model.config.head_size, norms_on
        )
        after = self._losses(module)
        self.effect = {
            "step": trainer.global_step,
            "loss_before": fmean(before),
            "loss_after": fmean(after),
            "sequences": {"before": before, "after": after},
        }
        self._reset_optimizer(trainer, module)
        log.info(
            "Step %d: dropped the encoding (%s); held-out loss %.3f before, %.3f after",
            trainer.global_step,
            settings.to,
            self.effect["loss_before"],
            self.effect["loss_after"],
        )
        self.add_metrics({f"drop/{key}": self.effect[key] for key in ("loss_before", "loss_after")})

    def _reset_optimizer(self, trainer: L.Trainer, module: LanguageModule) -> None:
        policy, (optimizer,) = self.config.drop.optimizer_state, trainer.optimizers
        if policy == "reset":
            optimizer.state.clear()
        elif policy == "reset_new" and module.model.config.qk_norm.when == "after_drop":
            for name, submodule in module.model.named_modules():
                if isinstance(submodule, RMSNorm) and name.endswith(("q_norm", "k_norm")):
                    optimizer.state.pop(submodule.weight, None)

    def _losses(self, module: LanguageModule) -> list[float]:
        """Of every sequence of the fixed batch."""
        with evaluating(module) as model:
            losses = [model.token_losses(*x).mean(dim=1) for x in self._micro_batches(module)]
            return torch.cat(losses).tolist()

    def _micro_batches(self, module: LanguageModule) -> list[tuple[Tensor, Tensor]]:
        """The fixed batch, inputs and targets, in parts of one size, no larger than those that the
        run trains on."""
        ids, labels = (self.effect_batch[k].to(module.device) for k in ("input_ids", "labels"))
        run, ranks = self.config.trainer, module.ranks.world_size
        largest = run.batch_size // (run.accumulation(ranks) * ranks)
        parts = next(n for n in range(-(-len(ids) // largest), len(ids) + 1) if len(ids) % n == 0)
        return list(zip(ids.chunk(parts), labels.chunk(parts), strict=True))
