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


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, in float32; on a GPU without another pass, if torch can."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda and a.element_size() == 2 and _adds_in_float32(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        total += a @ b
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


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
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        log_z, picked = torch.empty_like(weights), torch.empty_like(weights)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], head)
            log_z[part], picked[part] = replace_by_gradient(logits, targets[part], weights[part])
            torch.mm(logits, head, out=grad_hidden[part])
            add_product(grad_weight, logits.T, hidden[part])
            del logits  # free them before the next chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return (weights * (log_z - picked)).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative: use the logits")
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: torch refuses a second backward.
        grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden.mul_(scale), grad_weight, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the weighted mean cross-entropy of ``softmax(hidden @ weight.T)`` in nats per token.

    Args:
        hidden: ``[..., d]``; products are in its dtype or autocast's, sums in float32.
        weight: ``[vocab, d]``, the head.
        targets: ``[...]`` token ids.
        weights: ``[...]`` constants >= 0, weights of the tokens, default 1; 0 excludes a token.

    Returns:
        A float32 scalar: sum(w * loss) / sum(w), or 0 if all weights are 0.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    weights = torch.ones_like(targets) if weights is None else weights.flatten()
    w = weights.float()
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    return _LinearCrossEntropy.apply(hidden, weight, targets, w)
