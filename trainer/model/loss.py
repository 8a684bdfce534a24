"""Cross-entropy of a linear head without the logits of all positions in memory.

Tokens pass through the head in chunks. The gradient of each chunk is computed during the forward
pass, so that its logits are computed once and then freed; backward only scales the gradient.

A chunk's logits stay in the dtype of the products, and their gradient is written over them.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

CHUNKS = {
    # glibc returns blocks of more than 32 MiB to the system, and page faults of allocating them
    # again cost more than the softmax. With smaller chunks, accumulating the head's gradient
    # costs more than the products.
    "cpu": (16 * 2**20, 128),
    # Few launches and few passes over the head's gradient; half a GiB in 16 bits.
    "cuda": (2**30, 1024),
}
"""Size of a chunk: at most so many bytes of logits in float32, and at least so many tokens."""

TILE = 128
"""Tokens of a GPU's matrix products that are computed together: a chunk has no partial tile."""


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory together."""
    most_bytes, tokens = CHUNKS.get(device.type, CHUNKS["cuda"])
    return max(tokens, most_bytes // (4 * vocab_size))


def equal_chunk_size(tokens: int, most: int) -> int:
    """Return a chunk size in whole tiles, of about ``most`` tokens or less.

    ``tokens`` are divided without a smaller last chunk, unless that takes twice as many chunks.
    """
    tiles = max(1, -(-tokens // TILE))
    most_tiles = -(-most // TILE)
    fewest = -(-tiles // most_tiles)
    count = next((n for n in range(fewest, 2 * fewest) if tiles % n == 0), fewest)
    return TILE * -(-tiles // count)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a kernel that reads the logits twice and writes their gradient over them once."""

    def replace(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x = logits.float()
        picked = x.gather(-1, targets[:, None])[:, 0]
        top = x.amax(dim=-1, keepdim=True)
        log_z = top + (x - top).exp().sum(dim=-1, keepdim=True).log()
        onehot = (torch.arange(x.shape[-1], device=x.device) == targets[:, None]).float()
        logits.copy_(((x - log_z).exp() - onehot) * weights[:, None])
        return log_z[:, 0], picked

    return torch.compile(replace)


def replace_by_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Write the loss's gradient over ``logits`` ``[N, vocab]``, computed in float32.

    ``logits``: products of a chunk. ``targets``, ``weights``: ``[N]``.

    Returns:
        log-partition and logit of the target, both ``[N]`` float32.
    """
    if logits.is_cuda:
        return _compiled()(logits, targets, weights)
    x = logits.float()
    top = x.amax(dim=-1)
    picked = x.gather(-1, targets[:, None])[:, 0]
    # One pass in the logits' memory; the largest probability gives the log-partition back.
    gradient = torch.softmax(x, dim=-1, out=x)
    log_z = top - gradient.amax(dim=-1).log_()
    gradient *= weights[:, None]
    gradient.scatter_add_(-1, targets[:, None], -weights[:, None])
    if gradient.dtype != logits.dtype:
        logits.copy_(gradient)
    return log_z, picked


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """Write ``beta * total + a @ b`` to ``total`` in float32; if ``beta`` is 0, ``total`` may hold
    anything. On a GPU the product itself adds, without another pass."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda and _adds_in_float32(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif total.is_cuda and beta == 0:
        total.copy_(a @ b)
    elif total.is_cuda:
        total.copy_(total * beta + a @ b)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


@cache
def _adds_in_float32(device: torch.device) -> bool:
    """Whether a device adds a bfloat16 product to a float32 matrix, which torch may not."""
    total = torch.ones(16, 16, device=device)
    a = total.bfloat16()
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError as error:
        log.warning("Gradients of the head take another pass: %s", error)
        return False
    return bool((total == 17).all())


class _LinearCrossEntropy(torch.autograd.Function):
    """The weighted sum of losses, with gradients that the forward pass has computed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        head = weight.to(hidden.dtype)
        size = equal_chunk_size(len(hidden), chunk_size(len(weight), hidden.device))
        grad_hidden = torch.empty_like(hidden)
        allocate = torch.empty_like if len(hidden) else torch.zeros_like
        grad_weight = allocate(weight, dtype=torch.float32)
        log_z, picked = torch.empty_like(weights), torch.empty_like(weights)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], head)
            log_z[part], picked[part] = replace_by_gradient(logits, targets[part], weights[part])
            torch.mm(logits, head, out=grad_hidden[part])
            add_product(grad_weight, logits.T, hidden[part], beta=float(start > 0))
            del logits  # free them before the next chunk
        ctx.gradients = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        return (weights * (log_z - picked)).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None  # scaled in place: a second backward is impossible
        # Scale and convert in one pass if the dtypes differ.
        same = ctx.weight_dtype == grad_weight.dtype
        scaled = grad_weight if same else torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        torch.mul(grad_weight, scale, out=scaled)
        return grad_hidden.mul_(scale), scaled, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``; products are in its dtype, sums and logarithms in float32.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` non-negative weights of the tokens, default 1; 0 excludes a token.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), or 0 if all weights are 0.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    w = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.flatten()
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    return _LinearCrossEntropy.apply(hidden, weight, targets, w)
