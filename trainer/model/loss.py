"""Cross-entropy of a linear head without the logits of all positions in memory.

Tokens pass through the head in chunks. The gradient of each chunk is computed during the forward
pass, so that its logits are computed once and then freed; backward only scales the gradient.
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
    """Size of a chunk: at most ``logits`` bytes in float32, at least ``tokens`` tokens, and
    ``rows`` rows of the gradient."""

    logits: int
    tokens: int
    rows: int


CHUNKS = {
    # glibc returns blocks of more than 32 MiB to the system, and page faults of allocating them
    # again cost more than the softmax. With smaller chunks, accumulating the head's gradient
    # costs more than the products.
    "cpu": Chunks(logits=16 * 2**20, tokens=128, rows=8192),
    # Few launches and few passes over the head's gradient; 2 GiB including the 16-bit copies
    # of a chunk.
    "cuda": Chunks(logits=2**30, tokens=1024, rows=2**31),
}


def chunks_on(device: torch.device) -> Chunks:
    """Return the chunk size for a device."""
    return CHUNKS.get(device.type, CHUNKS["cuda"])


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory together."""
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
        if softcap is not None:  # its slope is kept beside the logits
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
            # One pass in the logits' memory; the largest probability gives log_z back.
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
            del logits, slope, grad  # free them before the next chunk
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
        ctx.gradients = None  # scaled in place: a second backward is impossible
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
    """Return the weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``; products are in its dtype, sums and logarithms in float32.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 excludes a token.
        z_loss: coefficient of the mean squared log-partition (PaLM, Sec. 5).
        softcap: cap of the logits, see :func:`trainer.model.softmax.capped`.
        losses: ``[...]`` float32, filled with every token's cross-entropy, without gradient.
        product: how matrices are multiplied on this device.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), or 0 if all weights are 0.
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
    """Return each token's cross-entropy, ``[...]`` float32, for evaluation; logits in chunks."""
    size = chunk_size(len(weight), hidden.device)
    states, of_states = hidden.flatten(0, -2).split(size), targets.flatten().split(size)
    head = weight.to(hidden.dtype)
    losses = [
        F.cross_entropy(capped(product(x, head, None).float(), softcap), y, reduction="none")
        for x, y in zip(states, of_states, strict=True)
    ]
    return torch.cat(losses).view(targets.shape)
