"""Cross-entropy of a linear head that never holds the logits of all positions.

Tokens go through the head in chunks. Each chunk's gradient is taken at once, in the forward pass,
so that its logits are computed once and thrown away; backward only scales what is there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 32 * 2**20


def chunk_size(vocab_size: int) -> int:
    """Tokens whose float32 logits fill about 32 MiB."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type of the head's matrix products: autocast's where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float
    ) -> Tensor:
        dtype = _compute_dtype(hidden)
        head = weight.to(dtype)
        size = chunk_size(weight.shape[0])
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            x, y, w = hidden[part].to(dtype), targets[part], weights[part]
            logits = (x @ head.T).float()
            log_z = logits.logsumexp(dim=-1, keepdim=True)
            picked = logits.gather(-1, y[:, None])
            total += (w[:, None] * (log_z - picked + z_loss * log_z.square())).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d/dlogits = w * (softmax * (1 + 2 z log_z) - onehot), built in the logits' memory.
            grad = logits.sub_(log_z).exp_()
            grad *= w[:, None] * (1 + 2 * z_loss * log_z) if z_loss else w[:, None]
            grad.scatter_add_(-1, y[:, None], -w[:, None])
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ head
            if dtype == torch.float32:
                grad_weight.addmm_(grad.T, x)
            else:
                grad_weight += grad.T @ x
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    z_loss: float = 0.0,
) -> Tensor:
    """Weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 leaves a token out.
        z_loss: coefficient of the mean squared log-partition (PaLM, Sec. 5).

    Returns:
        A float32 scalar: sum(w * loss) / sum(w).
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    w = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.flatten()
    w = w / w.sum()
    return _LinearCrossEntropy.apply(hidden, weight, targets, w, z_loss)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every token, ``[...]`` float32, for evaluation; logits in chunks."""
    flat, y = hidden.flatten(0, -2), targets.flatten()
    head = weight.to(_compute_dtype(hidden))
    losses = [
        F.cross_entropy((x.to(head.dtype) @ head.T).float(), t, reduction="none")
        for x, t in zip(
            flat.split(chunk_size(weight.shape[0])),
            y.split(chunk_size(weight.shape[0])),
            strict=True,
        )
    ]
    return torch.cat(losses).view(targets.shape)
