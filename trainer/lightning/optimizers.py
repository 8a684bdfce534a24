"""Optimizers, each a function that registers itself by its name: AdamW, and Muon with AdamW."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.common.registry import Registry

MOMENTUM = 0.95
"""Momentum of Muon."""
BATCH_ELEMENTS = 2**26
"""Elements of matrices that are orthogonalized together; one matrix at least."""

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS = Registry[Make]("optimizer")
"""Functions that make optimizers, by their names."""


def optimizer(function: Make) -> Make:
    """Register an optimizer under the name of its function.

    The function gets three groups of parameters with their weight decay: matrices of blocks,
    embeddings with an untied head, norms and biases. Its keyword arguments are its settings, ``lr``
    among them. The optimizer's state must consist of tensors, which checkpoints hold.
    """
    OPTIMIZERS.add(function.__name__, function, function)
    return function


@optimizer
def adamw(
    groups: list[dict[str, Any]], *, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.Optimizer:
    """Create AdamW."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


@optimizer
def muon(
    groups: list[dict[str, Any]],
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    muon_lr: float = 0.02,
) -> torch.optim.Optimizer:
    """Create Muon for the matrices of blocks, with AdamW for the rest; raise a ValueError if the
    model is sharded."""
    matrices, *rest = groups
    if any(isinstance(matrix, DTensor) for matrix in matrices["params"]):
        raise ValueError("optimizer: muon needs whole matrices (one process or DDP)")
    of_rest = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)
    return MuonWithAdamW(matrices | {"lr": muon_lr, "momentum": MOMENTUM}, of_rest)


def make_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    weight_decay: float = 0.1,
    decay_embeddings: bool = False,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Create a registered optimizer over all parameters of ``model``.

    Matrices of blocks have weight decay; embeddings and an untied head have it with
    ``decay_embeddings``; norms and biases never. Every group stores ``initial_lr``, which schedules
    multiply. ``settings``: arguments of its function.
    """
    matrices, embeddings, vectors = [], [], []
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif "embed_tokens" in parameter_name or "lm_head" in parameter_name:
            embeddings.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": embeddings, "weight_decay": weight_decay if decay_embeddings else 0.0},
        {"params": vectors, "weight_decay": 0.0},
    ]
    result = OPTIMIZERS.find(name, "optimizer")(groups, **settings)
    for group in result.param_groups:
        group["initial_lr"] = group["lr"]
    return result


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, over all shards, as a plain scalar tensor."""
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps read :func:`scale_or_skip_next_step`: torch's fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def scale_or_skip_next_step(optimizer: torch.optim.Optimizer, factor: Tensor, skip: Tensor) -> None:
    """Make the next step multiply gradients by ``factor``, or do nothing if ``skip`` is true.

    Both are scalars on the device. torch's fused kernels read them as in gradient scaling, so that
    neither clipping nor skipping causes a host sync.
    """
    optimizer.grad_scale = torch.where(skip, 1.0, factor.reciprocal())  # type: ignore[attr-defined]  # torch's optimizers get it from GradScaler, untyped
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # as grad_scale


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`scale_or_skip_next_step`, which otherwise holds for later steps too."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) and AdamW behind the interface of one optimizer.

    AdamW uses this object's parameter groups and state, so that saving, loading, resetting and
    setting learning rates concern a single optimizer. ``grad_scale`` and ``found_inf`` work as in
    torch's fused optimizers, see :func:`scale_or_skip_next_step`. torch's own Muon has neither, and
    orthogonalizes one matrix at a time.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # torch's mark of optimizers that read both

    def __init__(self, matrices: dict[str, Any], adamw: torch.optim.AdamW) -> None:
        self._adamw: Any = adamw  # torch declares neither grad_scale nor found_inf
        super().__init__([matrices, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; ``closure`` recomputes the loss first, as Lightning requires."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, matrices in by_shape.items():
            most = max(1, BATCH_ELEMENTS // shape.numel())
            for first in range(0, len(matrices), most):
                self._step_batch(matrices[first : first + most], self.param_groups[0])
        # torch replaces groups and state when it loads them.
        self._adamw.param_groups = self.param_groups[1:]
        self._adamw.state = self.state
        self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
        self._adamw.step()
        return loss

    def _step_batch(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape together: on the host a step costs as much as one matrix."""
        averages = []
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            averages.append(self.state[p]["momentum_buffer"])
        old = torch.stack(list(matrices))
        average = torch.stack(averages)
        grad = torch.stack([p.grad for p in matrices if p.grad is not None])
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        new = average.lerp(grad, 1 - group["momentum"])
        torch._foreach_copy_(averages, list(self._unless_skipped(new, average)))
        update = newton_schulz(grad.lerp(new, group["momentum"]))  # Nesterov's lookahead
        rows, columns = matrices[0].shape
        # Larger updates for tall matrices (Jordan et al. 2024).
        lr = group["lr"] * math.sqrt(max(1, rows / columns))
        new = torch.add(old * (1 - group["lr"] * group["weight_decay"]), update, alpha=-lr)
        torch._foreach_copy_(list(matrices), list(self._unless_skipped(new, old)))

    def _unless_skipped(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the new value, or the old one where the step is skipped."""
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Make all singular values of matrices ``[N, rows, columns]`` nearly 1; return bfloat16.

    Five iterations of Jordan et al. 2024, with their coefficients, in bfloat16 on a GPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(_iteration_dtype(matrices.device.type))
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.contiguous().bfloat16()


def _iteration_dtype(device: str) -> torch.dtype:
    """Return bfloat16, or float32 on CPUs without instructions for it."""
    mkldnn: Any = torch.ops.mkldnn
    is_fast = device != "cpu" or (
        torch.backends.mkldnn.is_available() and mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.bfloat16 if is_fast else torch.float32
