"""Cross-entropy of a linear head that never holds the logits of all positions.

Tokens go through the head in chunks. Each chunk's gradient is taken at once, in the forward pass,
so that its logits are computed once and thrown away; backward only scales what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.linear import Product
from trainer.model.softmax import capped


@dataclass(frozen=True)
class Chunks:
    """How much goes through the head at once: ``logits`` bytes in float32, of ``tokens`` or more,
    and ``rows`` of its gradient."""

    logits: int
    tokens: int
    rows: int


CHUNKS = {
    # A C allocator hands blocks of more than 32 MiB back to the system, and the page faults of
    # getting them again cost more than the softmax. With fewer tokens, adding to the head's
    # gradient costs more than the products.
    "cpu": Chunks(logits=16 * 2**20, tokens=128, rows=8192),
    # Few launches and few passes over the head's gradient; with the copies of a chunk in 16 bits,
    # 2 GiB.
    "cuda": Chunks(logits=2**30, tokens=1024, rows=2**31),
}


def chunks_on(device: torch.device) -> Chunks:
    """What suits a device."""
    return CHUNKS.get(device.type, CHUNKS["cuda"])


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """Tokens whose logits are there at once."""
    chunks = chunks_on(device)
    return max(chunks.tokens, chunks.logits // (4 * vocab_size))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        z_loss: float,
        softcap: float | None,
        losses: Tensor | None,
        product: Product,
    ) -> Tensor:
        dtype = hidden.dtype
        head = weight.to(dtype)
        size, rows_at_once = chunk_size(len(weight), hidden.device), chunks_on(hidden.device).rows
        if softcap is not None:  # whose slope is held beside the logits
            size = max(size // 2, 1)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None
        log_z, picked = torch.empty_like(weights), torch.empty_like(weights)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            x, y, w = hidden[part], targets[part], weights[part]
            logits = capped(product(x, head, None).float(), softcap)
            slope = None
            if softcap is not None and grad_hidden is not None:
                slope = (logits / softcap).square_().neg_().add_(1)
            top = logits.amax(dim=-1)
            picked[part] = logits.gather(-1, y[:, None])[:, 0]
            # One pass in the logits' memory; the likeliest token's probability gives log_z back.
            grad = torch.softmax(logits, dim=-1, out=logits)
            torch.sub(top, grad.amax(dim=-1).log_(), out=log_z[part])
            if grad_hidden is None or grad_weight is None:
                del logits, grad
                continue
            # d/dlogits = w * (softmax * (1 + 2 z log_z) - onehot)
            grad *= (w * (1 + 2 * z_loss * log_z[part]) if z_loss else w)[:, None]
            grad.scatter_add_(-1, y[:, None], -w[:, None])
            grad = (grad if slope is None else grad.mul_(slope)).to(dtype)
            grad_hidden[part] = product(grad, head.T, None)
            for first in range(0, len(weight), rows_at_once):
                rows = slice(first, first + rows_at_once)
                grad_weight[rows] += product(grad.T[rows], x.T, None)
            del logits, slope, grad  # before the next chunk's are there
        ctx.gradients = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        each = log_z - picked
        if losses is not None:
            losses.copy_(each)
        return (weights * (each + z_loss * log_z.square() if z_loss else each)).sum()

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
            *(None,) * 6,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    losses: Tensor | None = None,
    product: Product = F.linear,
) -> Tensor:
    """Weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``; products are in its type, sums and logarithms in float32.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 leaves a token out.
        z_loss: coefficient of the mean squared log-partition (PaLM, Sec. 5).
        softcap: of the logits, see :func:`trainer.model.softmax.capped`.
        losses: ``[...]`` float32 to be filled with every token's cross-entropy, without gradient.
        product: how matrices are multiplied on this device.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), and 0 where all weights are 0.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    w = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.flatten()
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    flat = None if losses is None else losses.view(-1)
    return _LinearCrossEntropy.apply(hidden, weight, targets, w, z_loss, softcap, flat, product)


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    product: Product = F.linear,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of every token, ``[...]`` float32, for evaluation; logits in chunks."""
    size = chunk_size(len(weight), hidden.device)
    states, of_states = hidden.flatten(0, -2).split(size), targets.flatten().split(size)
    head = weight.to(hidden.dtype)
    losses = [
        F.cross_entropy(capped(product(x, head, None).float(), softcap), y, reduction="none")
        for x, y in zip(states, of_states, strict=True)
    ]
    return torch.cat(losses).view(targets.shape)
