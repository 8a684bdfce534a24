"""Lightning module: a decoder, its loss, its optimizer and the learning rate of every step.

Lightning trains a step as it always does: ``training_step`` and ``backward`` for each micro-batch,
callbacks' ``on_before_optimizer_step``, ``configure_gradient_clipping``, ``optimizer.step()``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.common.errors import UserError
from trainer.common.schedule import Schedule
from trainer.lightning.optimizers import (
    forget_scale,
    global_norm,
    make_optimizer,
    scale_or_skip_next_step,
    skips_on_device,
)
from trainer.lightning.strategy import mesh_of_ranks, shard
from trainer.lightning.updates import updates_done
from trainer.model.backends import Mask, cudnn_attention, flex, sdpa
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout

IGNORED = -100
"""Label of tokens that do not count, as ``ignore_index`` of torch's cross-entropy."""
Batch = Mapping[str, Any]
"""``input_ids`` and ``labels`` ``[B, T]``, and optional ``weights`` of tokens ``[B, T]``,
``documents``, ``bounds`` and ``longest``, see :class:`~trainer.model.backends.Mask`."""


class LanguageModule(L.LightningModule):
    """Trainable :class:`Decoder`; ``model.layout`` is its present encoding.

    A subclass may override :meth:`configure_optimizers`. For several optimizers it sets
    ``automatic_optimization = False``, as always in Lightning; each update steps all of them.

    Args:
        model: the decoder.
        lr: learning rate of AdamW.
        schedule: maps the number of updates done to a factor on the learning rates, such as
            :func:`~trainer.common.schedule.schedule`; None: constant.
        optimizer: name of a registered optimizer: adamw, or muon (for the matrices of blocks,
            AdamW for the rest), or one of your own.
        gradient_clip: largest norm of a gradient, unless ``Trainer(gradient_clip_val=...)`` says
            another; 0: no clipping. Updates whose loss or gradient is not finite are skipped.
        attention: a backend, or auto.
        optimizer_options: other settings of its function in
            :mod:`trainer.lightning.optimizers`.
    """

    def __init__(
        self,
        model: Decoder,
        lr: float = 3e-4,
        *,
        schedule: Schedule | None = None,
        optimizer: str = "adamw",
        gradient_clip: float = 1.0,
        attention: str = "auto",
        **optimizer_options: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model", "schedule"])
        self.model = model
        self.schedule = schedule
        self.optimizer_options: dict[str, Any] = {"name": optimizer, "lr": lr, **optimizer_options}
        self.gradient_clip = gradient_clip
        self.attention = attention
        self.tally = Tally()
        self.micro_batches: list[Tensor] = []
        """Sum of weighted losses and sum of weights of each micro-batch of the present step."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._unit = torch.ones(())
        self._uses_cudnn = False
        self._own_dtypes: list[torch.dtype | None] = []  # of the decoder, during bf16-mixed

    def configure_model(self) -> None:
        """Shard the model for Lightning's ``ModelParallelStrategy``, unless it is sharded.

        Lightning calls this repeatedly, and without a trainer in ``load_from_checkpoint``. Raise a
        UserError if ranks would share their data, as with Lightning's default sizes.
        """
        if self._trainer is None:
            return
        self._restore_dtype()  # of a fit that was interrupted
        if self.trainer.precision == "bf16-mixed":
            self._own_dtypes.append(self.model.compute_dtype)
            self.model.compute_dtype = torch.bfloat16
        strategy = self.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy):
            return
        if strategy.device_mesh["tensor_parallel"].size() > 1:
            raise UserError(
                "strategy: expected ModelParallelStrategy(data_parallel_size=RANKS, "
                "tensor_parallel_size=1)"
            )
        if not isinstance(self.model, FSDPModule):
            half = self.model.compute_dtype is not None
            shard(self.model, mesh_of_ranks(strategy.root_device), half)
            self._optimizer = None  # of the parameters before

    def configure_optimizers(self) -> Any:
        """Create the optimizer, or return the one of earlier fits."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self.model, **self.optimizer_options)
        return self._optimizer

    def on_train_start(self) -> None:
        """Check the trainer and the optimizers, see :func:`check_updates`, and begin a step."""
        check_updates(self)
        self.micro_batches.clear()  # of a fit that was interrupted

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        """Set the learning rates of the step."""
        if self.schedule is None:
            return
        factor = self.schedule(updates_done(self.trainer))
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the mean loss of a micro-batch ``[B, T]``, weighted by its tokens' weights."""
        if isinstance(self.model, FSDPModule):  # hsdp adds up the shards of all groups once a step
            self.model.set_requires_all_reduce(ends_step(self.trainer, index))
        backend = self.model.use_backend(
            self.attention,
            self.trainer.strategy.root_device.type,
            documents="documents" in batch,
            half=self.model.compute_dtype is not None or "16" in str(self.trainer.precision),
            length=batch["input_ids"].shape[1],
        )
        self._uses_cudnn = backend == "cudnn"
        weights = token_weights(batch)
        with self._numerics(self._uses_cudnn):
            labels = batch["labels"].masked_fill(batch["labels"] == IGNORED, 0)
            loss = self.model.loss(batch["input_ids"], labels, weights, **masking(batch))
        weight = weights.sum()
        self.micro_batches.append(torch.stack([loss.detach() * weight, weight]))
        if getattr(self.trainer, "log_every_n_steps", 0):
            self.log("loss", loss.detach(), prog_bar=True)
        if not self.automatic_optimization:
            self._update_manually(loss)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradient of a micro-batch's loss times its weight.

        The unit of weights is the weight of the step's first micro-batch, averaged over the ranks:
        gradients have their usual size before :meth:`finish_gradients`, too.
        """
        if not self.micro_batches:
            raise UserError("training_step: expected a call of LanguageModule.training_step")
        weight = self.micro_batches[-1][1]
        if len(self.micro_batches) == 1:
            self._unit = mean_over_ranks(weight.clone()).clamp(min=1.0)
        with self._numerics(self._uses_cudnn):  # recomputed activations need the same kernel
            super().backward(loss * (weight / self._unit), *args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Finish the gradients of a step: Lightning updates the weights next."""
        limit = self.gradient_clip if gradient_clip_val is None else gradient_clip_val
        self.finish_gradients([optimizer], limit)

    def finish_gradients(
        self, optimizers: Sequence[torch.optim.Optimizer], gradient_clip: float
    ) -> None:
        """Make the accumulated gradients those of the step's mean loss, clip them by their global
        norm, and skip the update that follows if loss or norm is not finite.

        A token counts equally in any micro-batch. Optimizers that are not fused cause a host sync.
        """
        # 1. Sums over the step, as means over the ranks: DDP and FSDP2 average gradients, too.
        loss_sum, weight = mean_over_ranks(torch.stack(self.micro_batches).sum(dim=0))
        loss = loss_sum / weight
        self.micro_batches.clear()

        # 2. Gradients are of losses times weight / unit. Lightning has divided each loss by the
        # micro-batches of a whole step, also if the data ends within this one.
        to_mean = self._unit * self.trainer.accumulate_grad_batches / weight

        # 3. The global norm, and clipping.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = global_norm(gradients) * to_mean
        factor = to_mean
        if gradient_clip:
            factor = to_mean * (gradient_clip / (norm + 1e-6)).clamp(max=1.0)

        # 4. What optimizer.step() does next: an update with these gradients, or nothing.
        skip = ~(norm.isfinite() & loss.isfinite())
        if all(skips_on_device(optimizer) for optimizer in optimizers):
            for optimizer in optimizers:
                scale_or_skip_next_step(optimizer, factor, skip)
        elif skip.item():
            for parameter in parameters:
                parameter.grad = None  # optimizers pass it over
        else:
            for gradient in gradients:
                gradient.mul_(factor)
        self.tally.add(loss, norm, skip)

    def _update_manually(self, loss: Tensor) -> None:
        """Make an update as Lightning would, with several optimizers."""
        optimizers: Any = self.optimizers()
        if not isinstance(optimizers, list):
            optimizers = [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.finish_gradients([each.optimizer for each in optimizers], self.gradient_clip)
        for optimizer in optimizers:
            optimizer.step()

    def on_train_end(self) -> None:
        """Leave the optimizers as any other loop expects them."""
        for optimizer in self.trainer.optimizers:
            forget_scale(optimizer)

    def teardown(self, stage: str) -> None:
        """Compute in the decoder's own dtype after ``bf16-mixed``, which is the trainer's."""
        self._restore_dtype()

    def _restore_dtype(self) -> None:
        if self._own_dtypes:
            self.model.compute_dtype = self._own_dtypes.pop()

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log ``val_loss``, the mean loss of a token in nats, weighted by the tokens' weights."""
        # Lightning's inference mode would leave FSDP2 parameters that have no gradients.
        with torch.inference_mode(False), torch.no_grad(), self._numerics(uses_cudnn=False):
            losses = self.model.token_losses(batch["input_ids"], batch["labels"], **masking(batch))
        weights = token_weights(batch)
        # Lightning's mean over micro-batches and ranks weighs by this number, a tensor as well.
        weight: Any = weights.sum()
        loss = (losses * weights).sum() / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=weight)

    @contextmanager
    def _numerics(self, uses_cudnn: bool) -> Iterator[None]:
        """Allow cuDNN's attention or not, and compute in the decoder's dtype without autocast."""
        with ExitStack() as stack:
            stack.enter_context(cudnn_attention(uses_cudnn))
            if self.trainer.precision == "bf16-mixed":
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the present encoding to a checkpoint of Lightning."""
        checkpoint["layout"] = self.model.layout.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the encoding of a checkpoint of Lightning."""
        self.model.layout = Layout.from_dict(checkpoint["layout"])


def token_weights(batch: Batch) -> Tensor:
    """Return the weights of a batch's tokens in float32; without weights all count equally, and
    labels that are :data:`IGNORED` never do."""
    weights = batch.get("weights", torch.ones(()))
    # Lightning's bf16-true rounds what a batch holds.
    return weights.float() * (batch["labels"] != IGNORED)


def masking(batch: Batch) -> dict[str, Mask]:
    """Return the mask of a batch's documents as an option of forward passes; empty without any."""
    if "documents" not in batch:
        return {}
    return {"mask": Mask(**{key: batch.get(key) for key in ("documents", "bounds", "longest")})}


def ends_step(trainer: L.Trainer, index: int) -> bool:
    """Whether an update follows micro-batch ``index``; an epoch's last step may have fewer."""
    is_whole = (index + 1) % trainer.accumulate_grad_batches == 0
    return is_whole or trainer.is_last_batch or index + 1 == trainer.num_training_batches


def check_updates(module: LanguageModule) -> None:
    """Raise a UserError if updates of a module cannot be what they promise with this strategy,
    precision, clipping, optimizer or scheduler."""
    trainer = module.trainer
    strategy = trainer.strategy
    precision = str(trainer.precision)
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        name = type(strategy).__name__
        raise UserError(f"strategy: expected one device, DDP or ModelParallelStrategy, got {name}")
    if precision.startswith("16"):
        # Gradients of single tokens vanish in float16 before a GradScaler can scale them.
        raise UserError(f"precision: expected bf16-mixed, bf16-true or 32-true, got {precision}")
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UserError("gradient_clip_algorithm: expected norm, got value")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise UserError("configure_optimizers: expected one loss for each update, got LBFGS")
    if trainer.lr_scheduler_configs and (module.schedule or not module.automatic_optimization):
        text = "beside LanguageModule(schedule=...) or without automatic optimization"
        raise UserError(f"schedule: expected no scheduler of configure_optimizers {text}")


def mean_over_ranks(x: Tensor) -> Tensor:
    """Average a tensor over all ranks, in place, without the host sync of Lightning's barrier."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


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
    """Losses and skipped updates, counted on the device.

    Only :meth:`read`, :meth:`skipped_in_a_row` and :meth:`state` cause a host sync.
    """

    def __init__(self) -> None:
        names = "loss", "steps", "skipped", "skipped_in_a_row"
        self._counts: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)
        self._gradient_norm: Tensor | float = float("nan")
        self._on_host: Tensor | None = None

    def add(self, loss: Tensor, gradient_norm: Tensor, skipped: Tensor) -> None:
        """Count an update by scalars on the device; losses that are not finite do not count."""
        finite = loss.isfinite()
        self._counts["loss"] += torch.where(finite, loss, 0.0)
        self._counts["steps"] += finite.float()
        self._counts["skipped"] += skipped.float()
        in_a_row = self._counts["skipped_in_a_row"] + 1.0
        self._counts["skipped_in_a_row"] = torch.where(skipped, in_a_row, 0.0)
        self._gradient_norm = gradient_norm

    def read(self) -> dict[str, float]:
        """Return the mean loss (NaN if no step was finite), which is then reset, the last gradient
        norm and the number of updates skipped since the start."""
        counts = self.state()
        self._counts |= {"loss": 0.0, "steps": 0.0}
        return {
            "loss": counts["loss"] / counts["steps"] if counts["steps"] else float("nan"),
            "gradient_norm": float(self._gradient_norm),
            "skipped_steps": int(counts["skipped"]),
        }

    def skipped_in_a_row(self) -> int:
        """Return the number of consecutive skipped updates, up to the last one."""
        return int(self._counts["skipped_in_a_row"])

    def lately_skipped_in_a_row(self) -> int:
        """Return :meth:`skipped_in_a_row` as of this update or one shortly before; no host sync."""
        count = self._counts["skipped_in_a_row"]
        if not isinstance(count, Tensor):
            return int(count)
        if self._on_host is None:
            self._on_host = torch.zeros((), pin_memory=count.is_cuda)
        # The number that is read is the last one that has arrived.
        self._on_host.copy_(count, non_blocking=True)
        return int(self._on_host)

    def state(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint between two logged rows."""
        return {name: float(value) for name, value in self._counts.items()}

    def load(self, state: dict[str, float], device: torch.device) -> None:
        """Resume from :meth:`state`."""
        for name in self._counts:
            self._counts[name] = torch.tensor(state[name], device=device)
