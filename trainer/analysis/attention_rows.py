"""Statistics of every query's attention distribution, in one pass over the scores.

Sinks, distances, entropies and positional biases are all computed from these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.capture import Heads
from trainer.model.masks import Mask
from trainer.model.softmax import capped, probabilities
from trainer.positional.encodings import alibi_slopes

BLOCK_ELEMENTS = 2**19
"""Scores in memory at a time: 2 MiB, which a core's cache holds."""

QUERIES = 128
"""The most queries of a text that :class:`SampledAttention` has."""

# Finite, so that its product with a probability of 0 is 0; exp of it is 0 in float32.
HIDDEN = -1e30


@dataclass(frozen=True)
class Rows:
    """One number a query, ``[B, Hq, T]`` float32.

    ``peak``: the largest dot product with a key it sees, before it is scaled and capped.
    ``sink``, ``own``, ``previous``: attention weight on the first key of the text, on its own and
    on the one before it (0 where it does not see that key). ``learned``: on the learned sink of
    the head (0 without one). ``distance``: mean of i - j, tokens, and ``entropy``, nats, of the
    attention that the keys share. ``visible`` ``[T]``: keys it sees.
    """

    visible: Tensor
    peak: Tensor
    sink: Tensor
    own: Tensor
    previous: Tensor
    distance: Tensor
    entropy: Tensor
    learned: Tensor


def head_slopes(heads: Heads) -> Tensor | None:
    """ALiBi's slope of every query head ``[Hq]``, 0 for one without; None where none has it."""
    biased = [spectrum.alibi for spectrum in heads.encoding.spectra]
    if not any(biased):
        return None
    slopes = torch.tensor(alibi_slopes(heads.q.shape[1]), device=heads.q.device)
    return slopes * torch.tensor(biased, device=heads.q.device).repeat_interleave(
        heads.queries_per_key
    )


def visible_keys(length: int, window: int | None, device: torch.device) -> Tensor:
    """How many keys every query sees ``[T]``, itself included."""
    return torch.arange(1, length + 1, device=device).clamp(max=window or length)


def attention_rows(heads: Heads, *, rotated: bool = True) -> Rows:
    """The statistics of a layer, block by block: the whole matrix is never in memory.

    Args:
        heads: queries and keys of a layer.
        rotated: as the layer attends; else from the queries and keys before their encoding, and
            without ALiBi's bias, within the same window.
    """
    q, k = (heads.rotated_q, heads.rotated_k) if rotated else (heads.q, heads.k)
    B, Hq, T = q.shape[:3]
    group, window = heads.queries_per_key, heads.encoding.window
    slopes = head_slopes(heads) if rotated else None
    names = ("peak", "sink", "own", "previous", "distance", "entropy", "learned")
    found = {name: q.new_empty(B, Hq, T) for name in names}
    size = max(16, min(512, BLOCK_ELEMENTS // (group * T)))
    for b in range(B):
        for kv in range(k.shape[1]):
            shared = slice(kv * group, (kv + 1) * group)
            for start in range(0, T, size):
                stop = min(start + size, T)
                first = 0 if window is None else max(0, start - window + 1)
                block = _block(
                    q[b, shared, start:stop],
                    k[b, kv, first:stop],
                    (start, first),
                    window,
                    None if slopes is None else slopes[shared],
                    (heads.scale, heads.softcap),
                    None if heads.sinks is None else heads.sinks[shared],
                )
                for name, values in zip(names, block, strict=True):
                    found[name][b, shared, start:stop] = values
    return Rows(visible_keys(T, window, q.device), **found)


def _block(
    q: Tensor,
    k: Tensor,
    at: tuple[int, int],
    window: int | None,
    slopes: Tensor | None,
    score: tuple[float, float | None],
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    """The numbers of :class:`Rows` for queries ``[G, b, D]`` and keys ``[n, D]`` of one head.

    ``at``: positions of the first query and of the first key; the last query sees the last key.
    ``score``: scaling and soft-cap of the scores. ``sinks``: ``[G]``.
    """
    (start, first), (scale, softcap) = at, score
    scores = (q * scale) @ k.T
    i = torch.arange(start, start + q.shape[1], device=q.device)[:, None]
    j = torch.arange(first, first + k.shape[0], device=q.device)
    # Before the block's first query all is in the past: only its own square needs the mask.
    own = start - first
    scores[..., own:].masked_fill_(j[own:] > i, HIDDEN)
    if window is not None:
        scores.masked_fill_(j <= i - window, HIDDEN)
    peak = scores.amax(dim=-1) / scale
    if softcap is not None:
        scores = capped(scores, softcap).masked_fill_(scores == HIDDEN, HIDDEN)
    if slopes is not None:
        scores += slopes[:, None, None] * (j - i)
    top = scores.amax(dim=-1, keepdim=True)
    scores -= top
    weights = scores.exp()
    # Totals and first moments of all rows in one product.
    moments = weights @ torch.stack([torch.ones_like(j), j - first], dim=1).to(weights.dtype)
    total, mean = moments[..., 0], moments[..., 1] / moments[..., 0]
    entropy = total.log() - (weights * scores).sum(dim=-1) / total
    if sinks is not None:
        total = total + (sinks[:, None] - top[..., 0]).exp()
    sink = weights[..., 0] / total if first == 0 else torch.zeros_like(total)
    diagonal = weights.diagonal(own, -2, -1) / total
    before = weights.diagonal(own - 1, -2, -1)
    if own == 0:  # the first query of the block does not see the key before it
        before = torch.nn.functional.pad(before, (1, 0))
    learned = 1 - moments[..., 0] / total
    return peak, sink, diagonal, before / total, i[:, 0] - first - mean, entropy, learned


def head_attention(heads: Heads, head: int, queries: slice) -> Tensor:
    """Attention ``[B, queries, queries.stop]`` of some queries of one head, float32."""
    q, k, slopes = heads.rotated_q, heads.rotated_k, head_slopes(heads)
    kv = head // heads.queries_per_key
    mask = Mask(heads.encoding.window, slopes=None if slopes is None else slopes[head : head + 1])
    softmax = heads.softmax
    if heads.sinks is not None:
        softmax = softmax._replace(sinks=heads.sinks[head : head + 1])
    found = probabilities(
        q[:, head : head + 1, queries],
        k[:, kv : kv + 1, : queries.stop],
        mask,
        softmax,
        scaling=heads.scaling,
    )
    return found[:, 0]


@dataclass(frozen=True)
class SampledAttention:
    """Attention of some queries of one head, as it is and with a pair's part taken out of scores.

    ``q`` ``[B, n, D]``: encoded queries at the positions ``at`` ``[n]``, evenly spread over the
    last three quarters of the training length, or of the text or the window where these are
    shorter, so that each sees all keys before it. ``k`` ``[B, T, D]``: encoded keys from the first
    on. ``pairs``: of the head's spectrum.
    """

    heads: Heads
    head: int
    kv_head: int
    pairs: int
    at: Tensor
    q: Tensor
    k: Tensor

    def weights(self, without: int | None = None) -> Tensor:
        """Attention ``[B, n, T]`` on every key, without that pair's part of the scores."""
        heads, at = self.heads, self.at[:, None]
        products = self.q @ self.k.mT
        if without is not None:
            channels = [without, without + self.pairs]
            products = products - self.q[..., channels] @ self.k[..., channels].mT
        slopes = head_slopes(heads)
        slope = 0.0 if slopes is None else float(slopes[self.head])
        keys = torch.arange(self.k.shape[1], device=at.device)
        scores = capped(products * heads.scale, heads.softcap) + slope * (keys - at)
        scores = scores.masked_fill(keys > at, -torch.inf)
        if heads.sinks is not None:
            scores = F.pad(scores, (0, 1), value=float(heads.sinks[self.head]))
        return scores.softmax(dim=-1)[..., : len(keys)]


def sampled_attention(heads: Heads, head: int) -> SampledAttention | None:
    """Choose the queries of one query head; None if none of them sees another key than its own."""
    length = min(heads.q.shape[2], heads.training_length, heads.encoding.window or heads.q.shape[2])
    if length < 2:
        return None
    kv = head // heads.queries_per_key
    start = max(1, length // 4)
    at = torch.linspace(start, length - 1, min(QUERIES, length - start), device=heads.q.device)
    at = at.round().long()
    q, k = heads.rotated_q[:, head, at], heads.rotated_k[:, kv, :length]
    pairs = len(heads.encoding.spectra[kv].inv_freq)
    return SampledAttention(heads, head, kv, pairs, at, q, k)
