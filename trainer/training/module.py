"""Lightning module: a decoder, its loss, its optimizer and the learning rate of every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from trainer.config import RunConfig
from trainer.data.dataset import Batch
from trainer.interchange.pretrained import Pretrained
from trainer.model.backends import Choice, cudnn_attention, flex, sdpa
from trainer.model.decoder import Decoder
from trainer.runs.layouts import configured_layout
from trainer.runs.phases import phase_at, phases_of
from trainer.runs.ranks import Ranks
from trainer.training.optimizers import (
    global_norm,
    gradients_of,
    make_optimizer,
    scale_or_skip_next_step,
)
from trainer.training.strategy import (
    least_memory,
    parallelize,
    reduces_once_a_step,
    reshard,
    synchronize_gradients,
)
from trainer.training.tally import StepTimer, Tally


def make_decoder(
    config: RunConfig, vocab_size: int, pretrained: Pretrained | None = None
) -> Decoder:
    """Create a run's decoder on the meta device, without weights.

    ``pretrained``: the model that provides the weights, and the encoding.
    """
    shape = replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    with torch.device("meta"):
        return Decoder(shape, pretrained.layout if pretrained else configured_layout(config))


class LanguageModule(L.LightningModule):
    """Trainable :class:`Decoder` with the schedules of its phases; independent of data and drops.

    ``resumes``: the weights will come from a checkpoint, so none are drawn.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Decoder,
        ranks: Ranks,
        pretrained: Pretrained | None = None,
        resumes: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.pretrained, self.resumes = pretrained, resumes
        self.model = model
        self.ranks = ranks
        self.phases = phases_of(config)
        self.tally = Tally()
        self.timer = StepTimer()
        self.reduces_once = True

    def configure_model(self) -> None:
        """Distribute the model over devices and initialize its weights; Lightning may call it
        repeatedly."""
        if self.model.norm.weight.is_meta:
            device = self.trainer.strategy.root_device
            drawn = not self.resumes
            parallelize(self.model, self.config, self.ranks, device, self.pretrained, drawn)
            kind = self.config.strategy.reduce_gradients
            self.reduces_once = reduces_once_a_step(self.model, kind, least_memory(device))

    def choose_attention(self, config: RunConfig, device: str) -> Choice:
        """Choose the attention kernels for the present layout, on "cpu" or "cuda".

        ``config``: the run as the present phase trains it.
        """
        return self.model.use_backend(
            config.model.attention_backend,
            device,
            documents=config.data.document_mask,
            half=config.trainer.precision == "bf16",
            length=config.data.sequence_length,
        )

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the loss of a micro-batch ``[B, T]``: the weighted sum over its tokens, divided by
        B T.

        Dividing by the sum of the weights happens once per step. A token thus counts equally
        whatever micro-batch and rank it is read on.
        """
        parts = self.trainer.accumulate_grad_batches
        last = (index + 1) % parts == 0
        synchronize_gradients(self.model, last or not self.reduces_once, last)
        weights = batch["weights"]
        losses = torch.empty_like(weights)
        loss = weights.mean() * self.model.loss(
            batch["input_ids"],
            batch["labels"],
            weights,
            documents=batch.get("documents"),
            bounds=batch.get("bounds"),
            longest=batch.get("longest"),
            positions=batch.get("positions"),
            z_loss=self.config.trainer.z_loss,
            losses=losses,
        )
        self.tally.add(losses, weights)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer; learning rates are set at every step."""
        return make_optimizer(self.model, self.config.optimizer)

    def on_train_batch_start(self, *_: Any) -> None:
        """Set this step's learning rates; there is no scheduler with state to save."""
        self.timer.enter("compute")
        factor = phase_at(self.phases, self.global_step).factor(self.global_step)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)  # configure_optimizers returns one
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any
    ) -> None:
        """Clip gradients by global norm and skip non-finite steps, without a host sync."""
        self.timer.enter("optimizer")
        loss, weight = self.tally.end_step()
        # Gradients of offloaded parameters are on the CPU.
        norm = global_norm(gradients_of(self.model)).to(loss.device) / weight
        limit = self.config.trainer.gradient_clip or float("inf")
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / weight
        skip = ~(norm.isfinite() & loss.isfinite())
        scale_or_skip_next_step(optimizer, torch.where(skip, 1.0, factor), skip)
        self.tally.end_update(loss, norm, skip)


def ends_step(trainer: L.Trainer, index: int) -> bool:
    """Whether micro-batch ``index`` of the loader is the last of its step."""
    return (index + 1) % trainer.accumulate_grad_batches == 0


class StepCallback(L.Callback):
    """Callback of steps, each of one or several micro-batches."""

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Act before a step's first micro-batch."""

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Act after a step's last micro-batch; ``trainer.global_step`` counts the step."""

    def on_train_batch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Begin a step if the micro-batch is its first one."""
        if index % trainer.accumulate_grad_batches == 0:
            self.begin_step(trainer, module)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """End a step if the micro-batch is its last one."""
        if ends_step(trainer, index):
            self.end_step(trainer, module)


@contextmanager
def evaluating(module: LanguageModule) -> Iterator[Decoder]:
    """Provide the decoder in training for forward passes in the run's precision, without gradients.

    Afterwards modes, random states, backends and shards are restored. Everything runs uncompiled:
    new shapes would recompile the blocks, and training would continue with other kernels. The time
    counts as ``monitor``. Ranks that share parameters must do the same forward passes.
    """
    model, device = module.model, module.device
    modes = {part: part.training for part in model.modules()}
    backends = [block.self_attn.attend for block in model.layers]
    module.timer.enter("monitor")
    try:
        model.eval()
        for block in model.layers:
            # Uncompiled FlexAttention materializes all scores.
            if block.self_attn.attend is flex:
                block.self_attn.attend = sdpa
        with (
            torch.no_grad(),
            cudnn_attention(False),  # it would make a plan for every new length
            isolate_rng(include_cuda=False),  # it creates a context on every GPU
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            yield model
    finally:
        for part, mode in modes.items():
            part.training = mode
        for block, backend in zip(model.layers, backends, strict=True):
            block.self_attn.attend = backend
        reshard(model)
        module.timer.enter("data")
