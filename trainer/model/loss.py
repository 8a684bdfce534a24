"""Cross-entropy of a linear head that never holds the logits of all positions.

Tokens go through the head in chunks. Each chunk's gradient is taken at once, in the forward pass,
so that its logits are computed once and thrown away; backward only scales what is there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.linear import Product

# A C allocator hands blocks of more than 32 MiB back to the system, and the page faults of getting
# them again cost more than the softmax.
CHUNK_BYTES = 16 * 2**20
# With fewer tokens a chunk, adding to the head's gradient costs more than the products.
MIN_TOKENS = 128
# Rows of the head's gradient that are computed and added at once.
ROWS = 8192


def chunk_size(vocab_size: int) -> int:
    """Tokens whose float32 logits fill about 16 MiB, and at least 128."""
    return max(MIN_TOKENS, CHUNK_BYTES // (4 * vocab_size))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type of the head's matrix products: autocast's where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        z_loss: float,
        losses: Tensor | None,
        product: Product,
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
            logits = product(x, head, None).float()
            top = logits.amax(dim=-1, keepdim=True)
            picked = logits.gather(-1, y[:, None])
            # One pass in the logits' memory; the likeliest token's probability gives log_z back.
            grad = torch.softmax(logits, dim=-1, out=logits)
            log_z = top - grad.amax(dim=-1, keepdim=True).log()
            if losses is not None:
                losses[part] = (log_z - picked)[:, 0]
            total += (w[:, None] * (log_z - picked + z_loss * log_z.square())).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d/dlogits = w * (softmax * (1 + 2 z log_z) - onehot)
            grad *= w[:, None] * (1 + 2 * z_loss * log_z) if z_loss else w[:, None]
            grad.scatter_add_(-1, y[:, None], -w[:, None])
            grad = grad.to(dtype)
            grad_hidden[part] = product(grad, head.T, None)
            for rows in range(0, weight.shape[0], ROWS):
                grad_weight[rows : rows + ROWS] += product(grad.T[rows : rows + ROWS], x.T, None)
        ctx.gradients = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: backward ran twice; call the loss again.")
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None  # scaled in place, so there is no second time
        return (
            grad_hidden.mul_(scale),
            grad_weight.mul_(scale).to(ctx.weight_dtype),
            *(None,) * 5,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    losses: Tensor | None = None,
    product: Product = F.linear,
) -> Tensor:
    """Weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 leaves a token out.
        z_loss: coefficient of the mean squared log-partition (PaLM, Sec. 5).
        losses: ``[...]`` float32 to be filled with every token's cross-entropy, without gradient.
        product: how matrices are multiplied on this device.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), and 0 where all weights are 0.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    w = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.flatten()
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    flat = None if losses is None else losses.view(-1)
    return _LinearCrossEntropy.apply(hidden, weight, targets, w, z_loss, flat, product)


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, product: Product = F.linear
) -> Tensor:
    """Cross-entropy of every token, ``[...]`` float32, for evaluation; logits in chunks."""
    flat, y = hidden.flatten(0, -2), targets.flatten()
    head = weight.to(_compute_dtype(hidden))
    losses = [
        F.cross_entropy(product(x.to(head.dtype), head, None).float(), t, reduction="none")
        for x, t in zip(
            flat.split(chunk_size(weight.shape[0])),
            y.split(chunk_size(weight.shape[0])),
            strict=True,
        )
    ]
    return torch.cat(losses).view(targets.shape)
