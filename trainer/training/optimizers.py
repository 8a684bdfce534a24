"""AdamW, or Muon for the matrices of the blocks and AdamW for the rest, behind one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.training.config import OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) and AdamW that look like one optimizer.

    Both share this object's parameter groups and state, so that saving, loading, resetting and
    setting learning rates need to know of one optimizer only.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        split = len(self._parts[0].param_groups)
        groups = self.param_groups
        for part, mine in zip(self._parts, (groups[:split], groups[split:]), strict=True):
            part.param_groups = mine
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; ``closure`` recomputes the loss first, as Lightning has it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state."""
        super().load_state_dict(state_dict)
        self._share()


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters of ``model``.

    Matrices of the blocks decay; embeddings and an untied head do with ``decay_embeddings``; norms
    and biases never. Every group keeps its ``initial_lr``, which schedules multiply.
    """
    matrices, embeddings, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif "embed_tokens" in name or "lm_head" in name:
            embeddings.append(parameter)
        else:
            matrices.append(parameter)
    decay = config.weight_decay
    groups = [
        {"params": embeddings, "weight_decay": decay if config.decay_embeddings else 0.0},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    if config.name == "adamw":
        groups = [{"params": matrices, "weight_decay": decay}, *groups]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **options)
    else:
        optimizer = MuonWithAdamW(
            torch.optim.Muon(
                matrices, lr=config.muon_lr, weight_decay=decay, momentum=config.muon_momentum
            ),
            torch.optim.AdamW(groups, **options),
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
