"""AdamW; or as one optimizer Muon for the matrices of blocks and AdamW for all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import OptimizerConfig

HAS_FAST_BF16 = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
CPU_DTYPE = torch.bfloat16 if HAS_FAST_BF16 else torch.float32
"""Dtype of :func:`newton_schulz`'s products on a CPU; other devices use bfloat16."""

BATCH = 2**26
"""Elements of a rank's matrices that are orthogonalized together; one matrix at least."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) and AdamW behind the interface of one optimizer.

    AdamW uses this object's parameter groups and state, so that saving, loading, resetting and
    setting learning rates concern a single optimizer. ``grad_scale`` and ``found_inf`` work as
    in torch's fused optimizers, see :func:`scale_or_skip_next_step`.

    torch's own Muon would redistribute a sharded matrix in every product of its iteration, and
    compute all of it on every rank.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

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
        self._step_matrices(self.param_groups[0])
        # torch replaces groups and state when it loads them.
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
        self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, matrices in by_shape.items():
            ranks = ranks_of(matrices[0])
            size = dist.get_world_size(ranks) if ranks else 1
            most = size * max(1, BATCH // shape.numel())
            for first in range(0, len(matrices), most):
                self._step_batch(matrices[first : first + most], group, ranks)

    def _step_batch(
        self, matrices: list[Tensor], group: dict[str, Any], ranks: dist.ProcessGroup | None
    ) -> None:
        """Update matrices of one shape together: on the host a step costs as much as one matrix."""
        averages = [self._average(p) for p in matrices]
        old = torch.stack([_local(p) for p in matrices])  # [matrices, rows of this rank, columns]
        average = torch.stack(averages)
        grad = torch.stack([_local(p.grad) for p in matrices])
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        new = average.lerp(grad, 1 - group["momentum"])
        torch._foreach_copy_(averages, list(self._unless_skipped(new, average)))
        del average
        rows, columns = matrices[0].shape
        update = grad.lerp(new, group["momentum"])  # Nesterov's lookahead
        if isinstance(matrices[0], DTensor):
            update = of_shards(update, ranks, rows, matrices[0].device_mesh.device_type)
        else:
            update = of_copies(update, ranks)
        # Larger updates for tall matrices (Jordan et al. 2024).
        lr = group["lr"] * math.sqrt(max(1, rows / columns))
        new = torch.add(old * (1 - group["lr"] * group["weight_decay"]), update, alpha=-lr)
        torch._foreach_copy_([_local(p) for p in matrices], list(self._unless_skipped(new, old)))

    def _average(self, p: Tensor) -> Tensor:
        """Return this rank's part of the gradient's moving average."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return _local(state["momentum_buffer"])

    def _unless_skipped(self, new: Tensor, old: Tensor) -> Tensor:
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)


def ranks_of(matrix: Tensor) -> dist.ProcessGroup | None:
    """Return the group of ranks with shards or copies of a matrix; None: only this rank."""
    if isinstance(matrix, DTensor):
        return matrix.device_mesh.get_group(matrix.device_mesh.ndim - 1)
    return dist.group.WORLD if dist.is_initialized() else None


def _local(x: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def of_copies(updates: Tensor, ranks: dist.ProcessGroup | None) -> Tensor:
    """Orthogonalize matrices ``[N, rows, columns]`` that every rank has: each computes some, and
    all gather them. Returns bfloat16."""
    if ranks is None:
        return newton_schulz(updates)
    each = -(-len(updates) // dist.get_world_size(ranks))
    mine = updates[each * dist.get_rank(ranks) :][:each]
    done = updates.new_zeros((each, *updates.shape[1:]), dtype=torch.bfloat16)
    if len(mine):
        done[: len(mine)] = newton_schulz(mine)
    whole = done.new_empty((each * dist.get_world_size(ranks), *updates.shape[1:]))
    # torch 2.13 renamed it, and warns of the former name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, done, group=ranks)
    return whole[: len(updates)]


def of_shards(
    updates: Tensor, ranks: dist.ProcessGroup | None, rows: int, device_type: str
) -> Tensor:
    """Orthogonalize matrices sharded by rows, in two exchanges.

    The first exchange gives every rank some whole matrices; the second one returns the shards.

    Args:
        updates: ``[N, rows of this rank, columns]``.
        ranks: group that shares the rows, as ``torch.chunk`` splits them.
        rows: rows of a whole matrix.
        device_type: where to compute, also if ``updates`` are offloaded.

    Returns:
        bfloat16, shaped as ``updates``.
    """
    size, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    shards = updates.to(device_type, iteration_dtype(device_type))
    count, _, columns = shards.shape
    each, chunk = -(-count // size), -(-rows // size)
    counts = [len(range(count)[r * each : (r + 1) * each]) for r in range(size)]
    heights = [len(range(rows)[r * chunk : (r + 1) * chunk]) for r in range(size)]
    sent = [n * shards[0].numel() for n in counts]
    received = [counts[rank] * height * columns for height in heights]
    gathered = shards.new_empty(sum(received))
    dist.all_to_all_single(gathered, shards.view(-1), received, sent, group=ranks)
    parts = zip(gathered.split(received), heights, strict=True)
    whole = torch.cat([x.view(counts[rank], height, columns) for x, height in parts], dim=1)
    whole = newton_schulz(whole) if counts[rank] else whole.bfloat16()
    back = torch.cat([x.flatten() for x in whole.split(heights, dim=1)])
    done = torch.empty_like(shards, dtype=torch.bfloat16)
    dist.all_to_all_single(done.view(-1), back, sent, received, group=ranks)
    return done.to(updates.device)


def iteration_dtype(device_type: str) -> torch.dtype:
    """Return the dtype of :func:`newton_schulz`'s products on a device."""
    return CPU_DTYPE if device_type == "cpu" else torch.bfloat16


def newton_schulz(matrices: Tensor) -> Tensor:
    """Make all singular values of matrices ``[N, rows, columns]`` nearly 1; return bfloat16.

    Five iterations of Jordan et al. 2024, with their coefficients.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(iteration_dtype(matrices.device.type))
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous().bfloat16()


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, over all shards, as a plain scalar tensor."""
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def scale_or_skip_next_step(optimizer: torch.optim.Optimizer, factor: Tensor, skip: Tensor) -> None:
    """Make the next step multiply gradients by ``factor``, and do nothing if ``skip`` is 1.

    Both are scalars on the device. torch's fused kernels read them as in gradient scaling, so that
    neither clipping nor skipping causes a host sync.
    """
    # Offloaded parameters are on the CPU, which must wait for the copy.
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = factor.reciprocal().to(device)  # type: ignore[attr-defined]  # torch's optimizers get it from GradScaler, untyped
    optimizer.found_inf = skip.float().to(device)  # type: ignore[attr-defined]  # as grad_scale


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the configured optimizer over all parameters of ``model``.

    Matrices of blocks have weight decay; embeddings and an untied head have it with
    ``decay_embeddings``; norms and biases never. Every group stores ``initial_lr``, which schedules
    multiply.
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
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "fused": True,
    }
    if config.name == "adamw":
        groups = [{"params": matrices, "weight_decay": decay}, *groups]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **options)
    else:
        optimizer = MuonWithAdamW(
            {
                "params": matrices,
                "lr": config.muon_lr,
                "weight_decay": decay,
                "momentum": config.muon_momentum,
            },
            torch.optim.AdamW(groups, **options),
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
