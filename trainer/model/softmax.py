"""The softmax of attention where it is more than that of scores, written out: scores kept within a
cap (Gemma 2, Riviere et al. 2024, Sec. 2), and a learned sink beside them (gpt-oss, OpenAI 2025).

No fused kernel but FlexAttention's has both with their gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.model.masks import Mask, bias


class Softmax(NamedTuple):
    """What a layer's softmax has beside scores and masks.

    ``sinks``: ``[Hq]``, for every query head a logit that takes part in each of its softmaxes and
    has no value, so that weights on keys sum to less than 1. ``softcap``: see :func:`capped`.
    """

    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but scores."""
        return self.sinks is None and self.softcap is None


PLAIN = Softmax()


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores kept within +-``softcap`` by softcap tanh(score / softcap) (Gemma 2); None: as they
    are."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def probabilities(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    softmax: Softmax = PLAIN,
    *,
    scaling: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attention probabilities ``[B, Hq, Tq, Tk]``, in float32 at least, written plainly.

    Dot products are scaled, capped, biased and masked; sinks stand beside what has become of them.
    ``scaling``: of the dot products (None: 1 / sqrt(D)). ``first``: the position of the first key;
    the last query sees the last key.
    """
    (B, Hq, Tq, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    precise = torch.promote_types(q.dtype, torch.float32)
    # Heads that share keys are queries of one head, so that no key is copied.
    shared = q.to(precise).reshape(B, Hkv, -1, D) @ k.to(precise).mT
    products = shared.view(B, Hq, Tq, Tk)
    scores = products / math.sqrt(D) if scaling is None else products * scaling
    scores = capped(scores, softmax.softcap)
    end = first + Tk
    more = bias(mask, range(end - Tq, end), range(first, end), scores)
    scores = scores + more if mask.slopes is not None else scores.masked_fill(~more, -math.inf)
    if softmax.sinks is None:
        return scores.softmax(dim=-1)
    sinks = softmax.sinks.to(precise)[:, None, None].expand(B, -1, Tq, 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax = PLAIN, first: int = 0
) -> Tensor:
    """The definition, and the reference in tests; ``first``: see :func:`probabilities`."""
    weights = probabilities(q, k, mask, softmax, first=first)
    B, Hkv, Tk, _ = v.shape
    return (weights.reshape(B, Hkv, -1, Tk) @ v.to(weights.dtype)).view(q.shape).to(q.dtype)


def recomputed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax, first: int) -> Tensor:
    """:func:`eager`, whose probabilities backward computes again instead of keeping them."""
    if not torch.is_grad_enabled():
        return eager(q, k, v, mask, softmax, first)
    arguments = (q, k, v, mask, softmax, first)
    return checkpoint(eager, *arguments, use_reentrant=False, preserve_rng_state=False)
