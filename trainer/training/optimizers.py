"""AdamW, or Muon for the matrices of blocks with AdamW for the rest, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.runs.training_config import OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) and AdamW behind the interface of one optimizer.

    AdamW uses this object's parameter groups and state, so that saving, loading, resetting and
    setting learning rates concern a single optimizer. ``grad_scale`` and ``found_inf`` are those of
    torch's fused optimizers, see :func:`scale_or_skip_next_step`.

    torch's own Muon would redistribute a sharded matrix in every product of its iteration, and
    compute all of it on every rank.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, matrices: dict[str, Any], adamw: torch.optim.AdamW) -> None:
        self._adamw: Any = adamw  # torch declares neither grad_scale nor found_inf
        super().__init__([matrices, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        self._adamw.param_groups = self.param_groups[1:]
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; ``closure`` recomputes the loss first, as Lightning requires."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices(self.param_groups[0])
        self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
        self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        # Matrices of equal size in a row, so that no rank waits for a larger one.
        matrices = sorted((p for p in group["params"] if p.grad is not None), key=Tensor.numel)
        ranks = ranks_of(matrices[0]) if matrices else None
        size = dist.get_world_size(ranks) if ranks else 1
        for first in range(0, len(matrices), size):
            some = matrices[first : first + size]
            updates = orthogonal([self._moving(p, group["momentum"]) for p in some], ranks)
            for p, update in zip(some, updates, strict=True):
                # Larger updates for tall matrices (Jordan et al. 2024).
                lr = group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                new = torch.add(p * (1 - group["lr"] * group["weight_decay"]), update, alpha=-lr)
                p.copy_(self._unless_skipped(new, p))

    def _moving(self, p: Tensor, momentum: float) -> Tensor:
        """Update and return the gradient's moving average, with Nesterov's lookahead."""
        assert p.grad is not None  # the caller omits parameters without gradients
        grad = p.grad if self.grad_scale is None else p.grad / self.grad_scale
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"].lerp(grad, 1 - momentum)
        state["momentum_buffer"].copy_(self._unless_skipped(average, state["momentum_buffer"]))
        return grad.lerp(average, momentum)

    def _unless_skipped(self, new: Tensor, old: Tensor) -> Tensor:
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state."""
        super().load_state_dict(state_dict)
        self._share()


def ranks_of(matrix: Tensor) -> dist.ProcessGroup | None:
    """Return the group of ranks with shards or copies of a matrix; None: only this rank."""
    if isinstance(matrix, DTensor):
        return matrix.device_mesh.get_group(matrix.device_mesh.ndim - 1)
    return dist.group.WORLD if dist.is_initialized() else None


def orthogonal(updates: Sequence[Tensor], ranks: dist.ProcessGroup | None) -> Iterable[Tensor]:
    """Make all singular values of each matrix nearly 1; return bfloat16 in the original layout.

    For every group of at most as many matrices as ranks, each rank computes one whole matrix, on
    its GPU even if it is offloaded.
    """
    if ranks is None:
        return map(newton_schulz, updates)
    return (_of_shards if isinstance(updates[0], DTensor) else _of_copies)(updates, ranks)


def _of_shards(updates: Sequence[Any], ranks: dist.ProcessGroup) -> Iterator[DTensor]:
    """Orthogonalize sharded matrices in two exchanges: gather shards, return new shards."""
    size, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    mesh = updates[0].device_mesh
    shards = [update.to_local().to(mesh.device_type, torch.bfloat16) for update in updates]
    mine = updates[rank].shape if rank < len(updates) else torch.Size((0, 0))
    rows = math.ceil(mine[0] / size)  # torch.chunk: the last shards are smaller
    parts = [len(range(mine[0])[r * rows : (r + 1) * rows]) * mine[1] for r in range(size)]
    given = [shard.numel() for shard in shards] + [0] * (size - len(shards))
    flat = torch.cat([shard.flatten() for shard in shards])
    whole = flat.new_empty(mine)
    dist.all_to_all_single(whole.view(-1), flat, parts, given, group=ranks)
    done = newton_schulz(whole) if whole.numel() else whole
    dist.all_to_all_single(flat, done.view(-1), given, parts, group=ranks)
    for update, shard, new in zip(updates, shards, flat.split(given), strict=False):
        local = new.view_as(shard).to(update.device)
        yield DTensor.from_local(
            local, mesh, update.placements, shape=update.shape, stride=update.stride()
        )


def _of_copies(updates: Sequence[Tensor], ranks: dist.ProcessGroup) -> Iterator[Tensor]:
    """Orthogonalize replicated matrices: each rank computes some and broadcasts them."""
    rank = dist.get_rank(ranks)
    mine = newton_schulz(updates[rank]) if rank < len(updates) else None
    for owner, update in enumerate(updates):
        done = mine
        if owner != rank or done is None:
            done = torch.empty_like(update, dtype=torch.bfloat16)
        dist.broadcast(done, group=ranks, group_src=owner)
        yield done


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Run the iteration of Jordan et al. 2024, with their coefficients, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)  # singular values of at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


def global_norm(
    parameters: Iterable[Tensor], of: Callable[[Tensor], Tensor | None] = lambda p: p.grad
) -> Tensor:
    """Return the 2-norm of all gradients, over all shards, as a plain scalar tensor.

    ``of``: tensors to use instead of the gradients.
    """
    norm = torch.nn.utils.get_total_norm([x for p in parameters if (x := of(p)) is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
