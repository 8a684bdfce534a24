"""Lightning module: a decoder, its loss, its optimizer and the learning rate of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.common.schedule import Schedule
from trainer.lightning.optimizers import global_norm, make_optimizer, scale_or_skip_next_step
from trainer.lightning.strategy import mesh_of_ranks, shard
from trainer.model.backends import cudnn_attention, flex, sdpa
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout

Batch = Mapping[str, Any]
"""``input_ids`` and ``labels`` ``[B, T]``, and optional ``weights`` of tokens ``[B, T]``,
``documents``, ``bounds`` and ``longest``, see :meth:`Decoder.hidden_states`."""


class LanguageModule(L.LightningModule):
    """Trainable :class:`Decoder`; ``model.layout`` is its present encoding.

    Args:
        model: the decoder, or one on the meta device for ``prepare``.
        lr: learning rate of AdamW.
        schedule: maps the number of updates done to a factor on the learning rates, such as
            :func:`~trainer.common.schedule.schedule`; None: constant.
        optimizer: adamw, or muon (for the matrices of blocks, AdamW for the rest).
        gradient_clip: largest norm of a gradient; 0: no clipping. Steps whose loss or gradient is
            not finite are skipped.
        attention: a backend, or auto.
        prepare: distributes a model of the meta device and sets its weights, given model and
            device.
        optimizer_options: other arguments of :func:`~trainer.lightning.optimizers.make_optimizer`.
    """

    def __init__(
        self,
        model: Decoder,
        lr: float = 3e-4,
        *,
        schedule: Schedule | None = None,
        optimizer: Literal["adamw", "muon"] = "adamw",
        gradient_clip: float = 1.0,
        attention: str = "auto",
        prepare: Callable[[Decoder, torch.device], None] | None = None,
        **optimizer_options: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model", "schedule", "prepare"])
        self.model = model
        self.schedule = schedule
        self.optimizer_options: dict[str, Any] = {"name": optimizer, "lr": lr, **optimizer_options}
        self.gradient_clip, self.attention = gradient_clip, attention
        self.prepare = prepare
        self.tally = Tally()
        self._optimizer: torch.optim.Optimizer | None = None

    def configure_model(self) -> None:
        """Distribute the model, by ``prepare`` or for Lightning's ``ModelParallelStrategy``;
        Lightning may call it repeatedly, and without a trainer in ``load_from_checkpoint``."""
        if self._trainer is None:
            return
        strategy = self.trainer.strategy
        if self.prepare is not None:
            if self.model.norm.weight.is_meta:
                self.prepare(self.model, strategy.root_device)
        elif isinstance(strategy, ModelParallelStrategy):
            half = self.model.compute_dtype is not None
            shard(self.model, mesh_of_ranks(strategy.root_device), half)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer, or return the one of earlier phases; learning rates are set at
        every step."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self.model, **self.optimizer_options)
        return self._optimizer

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the loss of a micro-batch ``[B, T]``: the weighted sum over its tokens, divided by
        B T.

        Dividing by the sum of the weights happens once per step. A token thus counts equally
        whatever micro-batch and rank it is read on.
        """
        if isinstance(self.model, FSDPModule):  # hsdp adds up the shards of all groups once a step
            is_last = (index + 1) % self.trainer.accumulate_grad_batches == 0
            self.model.set_requires_all_reduce(is_last)
        weights = batch.get("weights")
        if weights is None:
            weights = torch.ones_like(batch["labels"], dtype=torch.float32)
        losses = torch.empty_like(weights)
        loss = weights.mean() * self.model.loss(
            batch["input_ids"],
            batch["labels"],
            weights,
            losses=losses,
            **{key: batch[key] for key in ("documents", "bounds", "longest") if key in batch},
        )
        self.tally.add(losses, weights)
        if getattr(self.trainer, "log_every_n_steps", 0):
            self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> Tensor:
        """Log ``val_loss``, the mean loss of a token in nats."""
        losses = self.model.token_losses(batch["input_ids"], batch["labels"])
        weights = batch.get("weights")
        weights = torch.ones_like(losses) if weights is None else weights
        loss = (losses * weights).sum() / weights.sum()
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        """Choose the attention kernel for batch and layout, and set this step's learning rates."""
        device = self.trainer.strategy.root_device.type
        name = self.model.use_backend(
            self.attention,
            device,
            documents="documents" in batch,
            half=self.model.compute_dtype is not None or "16" in str(self.trainer.precision),
            length=batch["input_ids"].shape[1],
        )
        if device == "cuda":  # cuDNN must see no mask, which a new layout may bring
            torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        if self.schedule is not None and index % self.trainer.accumulate_grad_batches == 0:
            factor = self.schedule(self.global_step)
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = group["initial_lr"] * factor

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by global norm and skip non-finite steps, without a host sync."""
        loss, weight = self.tally.end_step()
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        norm = global_norm(gradients) / weight
        limit = gradient_clip_val or self.gradient_clip or float("inf")
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / weight
        skip = ~(norm.isfinite() & loss.isfinite())
        scale_or_skip_next_step(optimizer, torch.where(skip, 1.0, factor), skip)
        self.tally.end_update(norm, skip)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the present encoding to a checkpoint of Lightning."""
        checkpoint["layout"] = self.model.layout.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the encoding of a checkpoint of Lightning."""
        self.model.layout = Layout.from_dict(checkpoint["layout"])


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Allow forward passes of a decoder in training, in the run's precision, without gradients.

    Afterwards backends and shards are restored. Everything runs uncompiled: new shapes would
    recompile the blocks, and training would continue with other kernels. Ranks that share
    parameters must do the same forward passes.
    """
    backends = [block.self_attn.attend for block in model.layers]
    try:
        for block in model.layers:
            # Uncompiled FlexAttention materializes all scores.
            if block.self_attn.attend is flex:
                block.self_attn.attend = sdpa
        with (
            torch.no_grad(),
            cudnn_attention(False),  # it would make a plan for every new length
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for block, backend in zip(model.layers, backends, strict=True):
            block.self_attn.attend = backend
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Tally:
    """Sums of losses, weights and skipped updates that stay on the device.

    Only :meth:`read`, :meth:`skipped_in_a_row` and :meth:`state` cause a host sync.
    """

    def __init__(self) -> None:
        names = "loss", "steps", "skipped", "skipped_in_a_row"
        self._counts: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)
        self._micro: list[Tensor] = []
        self._gradient_norm: Tensor | float = float("nan")

    def add(self, losses: Tensor, weights: Tensor) -> None:
        """Add a micro-batch: losses of its tokens and their weights, both ``[B, T]`` float32."""
        self._micro.append(torch.stack([(losses * weights).mean(), weights.mean()]))

    def end_step(self) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the step and the mean weight of its tokens, over all ranks."""
        sums = torch.stack(self._micro).mean(dim=0)
        # Lightning's version has a barrier, which causes a host sync.
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
            sums /= dist.get_world_size()
        self._micro = []
        loss, weight = sums[0] / sums[1], sums[1]
        finite = loss.isfinite()
        self._counts["loss"] += torch.where(finite, loss, 0.0)
        self._counts["steps"] += finite.float()
        return loss, weight

    def end_update(self, gradient_norm: Tensor, skipped: Tensor) -> None:
        """Add the update of a step."""
        self._gradient_norm = gradient_norm
        self._counts["skipped"] += skipped.float()
        in_a_row = self._counts["skipped_in_a_row"] + 1.0
        self._counts["skipped_in_a_row"] = torch.where(skipped, in_a_row, 0.0)

    def read(self) -> dict[str, float]:
        """Return the values to log, and reset losses.

        These are the mean loss (NaN if no step was finite), the last gradient norm and the updates
        skipped since the start.
        """
        loss, steps, skipped, _ = map(float, self._counts.values())
        self._counts |= {"loss": 0.0, "steps": 0.0}
        return {
            "loss": loss / steps if steps else float("nan"),
            "gradient_norm": float(self._gradient_norm),
            "skipped_steps": int(skipped),
        }

    def skipped_in_a_row(self) -> int:
        """Return the number of consecutive skipped updates, up to the last one."""
        return int(self._counts["skipped_in_a_row"])

    def state(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint between two logged rows."""
        return {name: float(value) for name, value in self._counts.items()}

    def load(self, state: dict[str, float], device: torch.device) -> None:
        """Resume from :meth:`state`."""
        for name in self._counts:
            self._counts[name] = torch.tensor(state[name], device=device)
