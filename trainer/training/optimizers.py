"""AdamW, or Muon for the matrices of the blocks and AdamW for the rest, behind one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.runs.config import OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) and AdamW that look like one optimizer.

    Both share this object's parameter groups and state, so that saving, loading, resetting and
    setting learning rates need to know of one optimizer only. ``grad_scale`` and ``found_inf`` are
    those of torch's fused optimizers, see :func:`scale_or_skip_next_step`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

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
        muon, adamw = self._parts
        if self.grad_scale is None or self.found_inf is None:
            muon.step()
        else:
            self._guarded_step(muon, 1 / self.grad_scale, self.found_inf > 0)
        adamw.grad_scale, adamw.found_inf = self.grad_scale, self.found_inf
        adamw.step()
        return loss

    def _guarded_step(self, muon: torch.optim.Optimizer, factor: Tensor, skip: Tensor) -> None:
        """Muon has no fused kernel that skips; so the momentum is fed to itself, which leaves it as
        it is, and the matrices are put back."""
        matrices = [p for g in muon.param_groups for p in g["params"] if p.grad is not None]
        for p in matrices:
            momentum = self.state[p].get("momentum_buffer", torch.zeros_like(p.grad))
            p.grad.copy_(torch.where(skip, momentum, p.grad * factor))
        before = [p.clone() for p in matrices]
        muon.step()
        for p, old in zip(matrices, before, strict=True):
            p.copy_(torch.where(skip, old, p))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state."""
        super().load_state_dict(state_dict)
        self._share()


def global_norm(
    parameters: Iterable[Tensor], of: Callable[[Tensor], Tensor | None] = lambda p: p.grad
) -> Tensor:
    """The 2-norm of all gradients together, over all shards of sharded ones; a plain scalar.

    ``of``: what to take the norm of instead of the gradients.
    """
    norm = torch.nn.utils.get_total_norm([x for p in parameters if (x := of(p)) is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_or_skip_next_step(optimizer: torch.optim.Optimizer, factor: Tensor, skip: Tensor) -> None:
    """Let the next step multiply gradients by ``factor``, and change nothing where ``skip`` is 1.

    Both are scalars on the gradients' device and stay there: torch's fused kernels read them as
    they do for gradient scaling, so that neither clipping nor skipping waits for the device.
    """
    optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]


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
