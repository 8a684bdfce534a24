"""Statistics of attention: for every query and for every head.

No function holds a whole attention matrix: scores are computed and reduced in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.arrays import Array
from trainer.analysis.capture import Heads
from trainer.positional.encodings import alibi_slopes

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Scores computed at a time: on a CPU 2 MiB, which fit in a core's cache; on a GPU 64 MiB, so that
long texts need few kernels."""

# Finite, so that its product with a probability of 0 is 0; exp of it is 0 in float32.
HIDDEN = -1e30


@dataclass(frozen=True)
class Rows:
    """Statistics of every query's attention, ``[B, Hq, T]`` float32 each.

    ``peak``: the largest dot product with a visible key, before scaling and soft-capping. ``sink``,
    ``diagonal``, ``previous``: attention on the first key of the text, on the query's own key and
    on the key before it (0 if that key is not visible). ``learned``: attention on the head's
    learned sink (0 without one). ``distance``: mean of i - j in tokens, and ``entropy`` in nats,
    both of the attention on keys alone. ``visible`` ``[T]``: number of keys that the query sees.
    """

    visible: Tensor
    peak: Tensor
    sink: Tensor
    diagonal: Tensor
    previous: Tensor
    distance: Tensor
    entropy: Tensor
    learned: Tensor


def head_slopes(heads: Heads) -> Tensor | None:
    """Return ALiBi's slope of every query head ``[Hq]``: 0 for heads without ALiBi; None if no head
    uses it."""
    biased = [spectrum.alibi for spectrum in heads.encoding.spectra]
    if not any(biased):
        return None
    slopes = torch.tensor(alibi_slopes(heads.q.shape[1]), device=heads.q.device)
    return slopes * torch.tensor(biased, device=heads.q.device).repeat_interleave(
        heads.queries_per_key
    )


def visible_keys(length: int, window: int | None, device: torch.device) -> Tensor:
    """Count the keys that every query sees ``[T]``, its own included."""
    return torch.arange(1, length + 1, device=device).clamp(max=window or length)


def attention_rows(heads: Heads, *, rotated: bool = True) -> Rows:
    """Compute the statistics of a layer block by block.

    ``rotated``: use the encoded queries and keys, as the layer attends. False: use them before
    their encoding, without ALiBi's bias, within the same window.
    """
    q, k = (heads.rotated_q, heads.rotated_k) if rotated else (heads.q, heads.k)
    B, Hq, T = q.shape[:3]
    group, window = heads.queries_per_key, heads.encoding.window
    slopes = head_slopes(heads) if rotated else None
    statistics = [q.new_empty(B, Hq, T) for _ in fields(Rows)[1:]]
    size = max(16, min(512, BLOCK_ELEMENTS[q.device.type] // (group * T)))
    for b, kv, start in product(range(B), range(k.shape[1]), range(0, T, size)):
        shared, stop = slice(kv * group, (kv + 1) * group), min(start + size, T)
        first = 0 if window is None else max(0, start - window + 1)
        i = torch.arange(start, stop, device=q.device)[:, None]
        j = torch.arange(first, stop, device=q.device)
        scores = (q[b, shared, start:stop] * heads.scale) @ k[b, kv, first:stop].T
        # Keys before the block's first query are visible to all its queries: only the rest needs
        # the mask.
        past = start - first
        scores[..., past:].masked_fill_(j[past:] > i, HIDDEN)
        if window is not None:
            scores.masked_fill_(j <= i - window, HIDDEN)
        peak = scores.amax(dim=-1) / heads.scale
        if heads.softcap is not None:
            scores = heads.capped(scores).masked_fill_(scores == HIDDEN, HIDDEN)
        if slopes is not None:
            scores += slopes[shared, None, None] * (j - i)
        top = scores.amax(dim=-1, keepdim=True)
        scores -= top
        weights = scores.exp()
        # One product gives the totals and first moments of all rows.
        moments = weights @ torch.stack([torch.ones_like(j), j - first], dim=1).to(weights.dtype)
        keys, mean = moments[..., 0], moments[..., 1] / moments[..., 0]
        entropy = keys.log() - (weights * scores).sum(dim=-1) / keys
        total = keys
        if heads.sinks is not None:
            total = keys + (heads.sinks[shared, None] - top[..., 0]).exp()
        sink = weights[..., 0] / total if first == 0 else torch.zeros_like(total)
        before = weights.diagonal(past - 1, -2, -1)
        if past == 0:  # the first query of the block does not see the key before it
            before = F.pad(before, (1, 0))
        diagonal = weights.diagonal(past, -2, -1) / total
        distance, learned = i[:, 0] - first - mean, 1 - keys / total
        block = peak, sink, diagonal, before / total, distance, entropy, learned
        for rows, values in zip(statistics, block, strict=True):
            rows[b, shared, start:stop] = values
    return Rows(visible_keys(T, window, q.device), *statistics)


def head_attention(
    heads: Heads, head: int, queries: slice | Tensor, *, without: int | None = None
) -> Tensor:
    """Return the attention ``[B, n, T]`` of one head's queries at some positions, float32, on the
    keys up to the last of these positions.

    ``queries``: positions, ascending. ``without``: a pair whose part of the scores is left out.
    """
    kv = head // heads.queries_per_key
    positions = torch.arange(heads.q.shape[2])[queries]
    last, i = int(positions[-1]), positions.to(heads.q.device)[:, None]
    q, k = heads.rotated_q[:, head, queries], heads.rotated_k[:, kv, : last + 1]
    j = torch.arange(last + 1, device=q.device)
    scores = q @ k.mT
    if without is not None:
        pair = [without, without + len(heads.encoding.spectra[kv].inv_freq)]
        scores -= q[..., pair] @ k[..., pair].mT
    scores = heads.capped(scores * heads.scale)
    if (slopes := head_slopes(heads)) is not None:
        scores += slopes[head] * (j - i)
    scores.masked_fill_((j > i) | (j <= i - (heads.encoding.window or last + 1)), -torch.inf)
    if heads.sinks is not None:
        scores = F.pad(scores, (0, 1), value=float(heads.sinks[head]))
    return scores.softmax(dim=-1)[..., : last + 1]


def attention_map(heads: Heads, head: int, *, size: int) -> Array:
    """Reduce a head's attention on the first text to a map of at most ``size`` cells a side.

    A cell covers ``ceil(T / size)`` queries and as many keys: it sums attention over its keys and
    averages over its queries. Every row sums to 1, less the weight of a learned sink.
    """
    T = heads.q.shape[2]
    cell = -(-T // size)
    names = ("q", "k", "rotated_q", "rotated_k")
    first = replace(heads, **{name: getattr(heads, name)[:1] for name in names})
    rows = []
    step = cell * max(1, 256 // cell)
    cells = -(-T // cell)
    for start in range(0, T, step):
        stop = min(start + step, T)
        attention = head_attention(first, head, slice(start, stop))[0]
        keys = F.pad(attention, (0, cells * cell - stop)).unflatten(-1, (cells, cell)).sum(dim=-1)
        rows += [part.mean(dim=0) for part in keys.split(cell)]
    return torch.stack(rows).cpu().numpy()


def head_statistics(rows: Rows) -> dict[str, Tensor]:
    """Average over the queries of each head ``[B, Hq]``, in texts of at least two tokens.

    ``distance``: tokens between query and key, weighted by attention. ``entropy``: divided by its
    largest possible value, the logarithm of the number of visible keys; 1 is uniform.
    ``sink_mass``: attention on the first key of the text. The first query, which sees only itself,
    is left out.
    """
    # A query with one visible key has entropy 0; log 2 avoids 0 / 0.
    largest = rows.visible[1:].clamp(min=2).log()
    return {
        "distance": rows.distance[..., 1:].double().mean(dim=-1),
        "entropy": (rows.entropy[..., 1:].double() / largest).mean(dim=-1),
        "sink_mass": rows.sink[..., 1:].double().mean(dim=-1),
    }


def stable_rank(gram: Tensor) -> Tensor:
    """Compute stable ranks of matrices K ``[..., T, D]`` from K^T K ``[..., D, D]``: the squared
    Frobenius norm over the squared spectral norm; NaN if K is zero or not finite."""
    # eigvalsh raises an error for values that are not finite.
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    gram = torch.where(finite, gram, 0.0)
    return gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / torch.linalg.eigvalsh(gram)[..., -1]
