"""Cross-entropy of a linear head without the logits of all positions in memory.

Tokens pass through the head in chunks. The gradient of each chunk is computed during the forward
pass, so that its logits are computed once and then freed; backward only scales the gradient.

On a GPU a chunk's logits stay in the dtype of the products, and one compiled kernel reads them
twice and writes their gradient over them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunks:
    """Size of a chunk: at most ``logits`` bytes in float32, at least ``tokens`` tokens, and
    ``rows`` rows of the gradient.

    ``fused``: chunks are equal, in multiples of :data:`TILE`, and go through
    :func:`replace_by_gradient` and :func:`add_product`.
    """

    logits: int
    tokens: int
    rows: int
    fused: bool = False


CHUNKS = {
    # glibc returns blocks of more than 32 MiB to the system, and page faults of allocating them
    # again cost more than the softmax. With smaller chunks, accumulating the head's gradient
    # costs more than the products.
    "cpu": Chunks(logits=16 * 2**20, tokens=128, rows=8192),
    # Few launches and few passes over the head's gradient; half a GiB in 16 bits.
    "cuda": Chunks(logits=2**30, tokens=1024, rows=2**31, fused=True),
}

TILE = 128
"""Tokens of a GPU's matrix products that are computed together: a chunk has no partial tile."""

COMPILED_ON = {"cuda"}
"""Types of devices on which :func:`replace_by_gradient` is compiled."""


def chunks_on(device: torch.device) -> Chunks:
    """Return the chunk size for a device."""
    return CHUNKS.get(device.type, CHUNKS["cuda"])


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory together."""
    chunks = chunks_on(device)
    return max(chunks.tokens, chunks.logits // (4 * vocab_size))


def equal_chunk_size(tokens: int, most: int) -> int:
    """Return a chunk size in whole tiles, of about ``most`` tokens or less.

    ``tokens`` are divided without a smaller last chunk, unless that takes twice as many chunks.
    """
    tiles, most_tiles = max(1, -(-tokens // TILE)), -(-most // TILE)
    fewest = -(-tiles // most_tiles)
    count = next((n for n in range(fewest, 2 * fewest) if tiles % n == 0), fewest)
    return TILE * -(-tiles // count)


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    x = logits.float()
    picked = x.gather(-1, targets[:, None])[:, 0]
    top = x.amax(dim=-1, keepdim=True)
    log_z = top + (x - top).exp().sum(dim=-1, keepdim=True).log()
    # d/dlogits = w * (softmax * (1 + 2 z log_z) - onehot)
    grad = (x - log_z).exp()
    if z_loss:
        grad = grad * (1 + 2 * z_loss * log_z)
    grad = grad - (torch.arange(x.shape[-1], device=x.device) == targets[:, None]).float()
    logits.copy_(grad * weights[:, None])
    return log_z[:, 0], picked


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_replace_by_gradient)


@torch.library.custom_op("unrope::replace_by_gradient", mutates_args=("logits",))
def replace_by_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Write the loss's gradient over ``logits`` ``[N, vocab]``, computed in float32.

    A GPU does so in one compiled kernel, which reads the logits twice and writes them once.

    ``logits``: products of a chunk. ``targets``, ``weights``: ``[N]``.

    Returns:
        log-partition and logit of the target, both ``[N]`` float32.
    """
    if logits.device.type in COMPILED_ON:
        try:
            return _compiled()(logits, targets, weights, z_loss)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = " ".join(str(error).splitlines()[:2])  # the cause is in the second line
            log.warning("The loss is not compiled, and slower: %s", why)
            COMPILED_ON.discard(logits.device.type)
    rows = 2 * TILE  # temporaries in float32 stay small
    parts = zip(logits.split(rows), targets.split(rows), weights.split(rows), strict=True)
    results = [_replace_by_gradient(x, y, w, z_loss) for x, y, w in parts]
    log_z, picked = (torch.cat(x) for x in zip(*results, strict=True))
    return log_z, picked


@replace_by_gradient.register_fake
def _(logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(weights)


@torch.library.custom_op("unrope::add_product", mutates_args=("total",))
def add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """Write ``beta * total + a @ b`` to ``total`` in float32; if ``beta`` is 0, ``total`` may hold
    anything. On a GPU the product itself adds, without another pass."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda and _adds_in_float32(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif total.is_cuda:
        total.copy_(total * beta + a @ b if beta else a @ b)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


@add_product.register_fake
def _(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    pass


@cache
def _adds_in_float32(device: torch.device) -> bool:
    """Whether a device adds a bfloat16 product to a float32 matrix, which torch may not."""
    a, total = torch.ones(16, 16, device=device).bfloat16(), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError as error:
        log.warning("Gradients of the head take another pass: %s", error)
        return False
    return bool((total == 17).all())


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
    ) -> Tensor:
        dtype = hidden.dtype
        head = weight.to(dtype)
        chunks, size = chunks_on(hidden.device), chunk_size(len(weight), hidden.device)
        if chunks.fused:
            size = equal_chunk_size(len(hidden), size)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        made = torch.empty_like if chunks.fused and len(hidden) else torch.zeros_like
        grad_weight = made(weight, dtype=torch.float32) if needs_gradient else None
        log_z, picked = torch.empty_like(weights), torch.empty_like(weights)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            x, y, w = hidden[part], targets[part], weights[part]
            if chunks.fused:
                logits = F.linear(x, head)
                log_z[part], picked[part] = replace_by_gradient(logits, y, w, z_loss)
                if grad_hidden is not None and grad_weight is not None:
                    torch.mm(logits, head, out=grad_hidden[part])
                    add_product(grad_weight, logits.T, x, min(start, 1))
                del logits
                continue
            logits = F.linear(x, head).float()
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
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ head
            for first in range(0, len(weight), chunks.rows):
                rows = slice(first, first + chunks.rows)
                grad_weight[rows] += grad.T[rows] @ x
            del logits, grad  # free them before the next chunk
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
        # Scale and convert in one pass if the dtypes differ.
        same = ctx.weight_dtype == grad_weight.dtype
        scaled = grad_weight if same else torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        torch.mul(grad_weight, scale, out=scaled)
        return grad_hidden.mul_(scale), scaled, *(None,) * 4


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    losses: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``; products are in its dtype, sums and logarithms in float32.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 excludes a token.
        z_loss: coefficient of the mean squared log-partition (PaLM, Sec. 5).
        losses: ``[...]`` float32, filled with every token's cross-entropy, without gradient.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), or 0 if all weights are 0.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    w = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.flatten()
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    flat = None if losses is None else losses.view(-1)
    return _LinearCrossEntropy.apply(hidden, weight, targets, w, z_loss, flat)


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return each token's cross-entropy, ``[...]`` float32, for evaluation; logits in chunks."""
    size = chunk_size(len(weight), hidden.device)
    states, of_states = hidden.flatten(0, -2).split(size), targets.flatten().split(size)
    head = weight.to(hidden.dtype)
    losses = [
        F.cross_entropy(F.linear(x, head).float(), y, reduction="none")
        for x, y in zip(states, of_states, strict=True)
    ]
    return torch.cat(losses).view(targets.shape)
