"""Attention probabilities, computed explicitly for analyses.

A soft-cap bounds the scores (Gemma 2, Riviere et al. 2024, Sec. 2). A learned sink is a logit
beside them (gpt-oss, OpenAI 2025). Models with either are computed by transformers (``hf:``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.model.backends import Mask, bias


class Softmax(NamedTuple):
    """Extensions of a layer's softmax.

    ``sinks``: ``[Hq]``, one logit per query head that takes part in each of its softmaxes and has
    no value, so that weights on keys sum to less than 1. ``softcap``: see :func:`capped`.
    """

    sinks: Tensor | None = None
    softcap: float | None = None


PLAIN = Softmax()


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Bound scores by softcap tanh(score / softcap) (Gemma 2); None returns them unchanged."""
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
    """Return attention probabilities ``[B, Hq, Tq, Tk]``, at least float32.

    Dot products are scaled, capped, biased and masked, in this order; sinks are added afterwards.
    ``scaling``: factor on the dot products (None: 1 / sqrt(D)). ``first``: position of the first
    key; the last query sees the last key.
    """
    (B, Hq, Tq, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    precise = torch.promote_types(q.dtype, torch.float32)
    # Heads that share keys become queries of one head, so that no key is copied.
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
