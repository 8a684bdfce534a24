"""The Lightning module: a decoder, its loss, its optimizer and the learning rate of every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from trainer.data.dataset import Batch
from trainer.model.decoder import Decoder
from trainer.positional.config import build_layout
from trainer.positional.layout import Layout
from trainer.training.checkpoints import description
from trainer.training.config import RunConfig
from trainer.training.optimizers import make_optimizer
from trainer.training.phases import phase_at, phases_of


def make_decoder(config: RunConfig, vocab_size: int) -> Decoder:
    """A freshly initialised decoder for a run, drawn from ``config.seed``."""
    shape = replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    layout = build_layout(
        config.positional,
        num_layers=shape.num_hidden_layers,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_size,
        training_length=config.data.sequence_length,
        qk_norm=shape.qk_norm.when == "always",
    )
    torch.manual_seed(config.seed)
    return Decoder(shape, layout)


class LanguageModule(L.LightningModule):
    """Trains a :class:`Decoder`; knows schedules and phases, and nothing of data or drops."""

    def __init__(self, config: RunConfig, model: Decoder, tokenizer_json: str) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.tokenizer_json = tokenizer_json
        self.phases = phases_of(config)
        self.gradient_norm: Tensor | None = None

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """The loss of a micro-batch ``[B, T]``."""
        return self.model.loss(
            batch["input_ids"],
            batch["labels"],
            batch["weights"],
            documents=batch.get("documents"),
            z_loss=self.config.trainer.z_loss,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; its learning rates are set anew at every step."""
        return make_optimizer(self.model, self.config.optimizer)

    def on_train_batch_start(self, *_: Any) -> None:
        """Set the learning rates for this step: no scheduler, hence no state to lose."""
        factor = phase_at(self.phases, self.global_step).factor(self.global_step)
        for group in self.optimizers().param_groups:
            group["lr"] = group["initial_lr"] * factor

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip by global norm, and keep the norm for the metrics without reading it."""
        limit = self.config.trainer.gradient_clip or float("inf")
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the checkpoint describe itself."""
        checkpoint["unrope"] = description(
            self.config, self.model, self.tokenizer_json, self.global_step
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the layout as it was at that moment, dropped or not."""
        self.model.layout = Layout.from_dict(checkpoint["unrope"]["layout"])
