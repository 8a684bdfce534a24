"""Statistics of attention: for every query, for every head, for some queries without one rotary
pair, and the five that a training run logs.

No function holds a whole attention matrix: scores are computed and reduced in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.arrays import Array
from trainer.analysis.capture import Heads, observing
from trainer.model.backends import Mask
from trainer.model.language_model import LanguageModel
from trainer.model.softmax import capped, probabilities
from trainer.positional.encodings import alibi_slopes

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Scores computed at a time: on a CPU 2 MiB, which fit in a core's cache; on a GPU 64 MiB, so that
long texts need few kernels."""

QUERIES = 128
"""Largest number of queries in :class:`SampledAttention`."""

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
    for b in range(B):
        for kv in range(k.shape[1]):
            shared = slice(kv * group, (kv + 1) * group)
            for start in range(0, T, size):
                stop = min(start + size, T)
                first = 0 if window is None else max(0, start - window + 1)
                block = _block(
                    heads,
                    q[b, shared, start:stop],
                    k[b, kv, first:stop],
                    (start, first),
                    None if slopes is None else slopes[shared],
                    None if heads.sinks is None else heads.sinks[shared],
                )
                for rows, values in zip(statistics, block, strict=True):
                    rows[b, shared, start:stop] = values
    return Rows(visible_keys(T, window, q.device), *statistics)


def _block(
    heads: Heads,
    q: Tensor,
    k: Tensor,
    starts: tuple[int, int],
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute the numbers of :class:`Rows` for queries ``[G, b, D]`` and keys ``[n, D]`` of one
    head, with their ``slopes`` and ``sinks`` ``[G]``.

    ``starts``: positions of the first query and of the first key; the last query sees the last key.
    """
    (start, first), window = starts, heads.encoding.window
    scores = (q * heads.scale) @ k.T
    i = torch.arange(start, start + q.shape[1], device=q.device)[:, None]
    j = torch.arange(first, first + k.shape[0], device=q.device)
    # Keys before the block's first query are visible to all its queries: only the rest needs the
    # mask.
    past = start - first
    scores[..., past:].masked_fill_(j[past:] > i, HIDDEN)
    if window is not None:
        scores.masked_fill_(j <= i - window, HIDDEN)
    peak = scores.amax(dim=-1) / heads.scale
    if heads.softcap is not None:
        scores = capped(scores, heads.softcap).masked_fill_(scores == HIDDEN, HIDDEN)
    if slopes is not None:
        scores += slopes[:, None, None] * (j - i)
    top = scores.amax(dim=-1, keepdim=True)
    scores -= top
    weights = scores.exp()
    # One product gives the totals and first moments of all rows.
    moments = weights @ torch.stack([torch.ones_like(j), j - first], dim=1).to(weights.dtype)
    total, mean = moments[..., 0], moments[..., 1] / moments[..., 0]
    entropy = total.log() - (weights * scores).sum(dim=-1) / total
    if sinks is not None:
        total = total + (sinks[:, None] - top[..., 0]).exp()
    sink = weights[..., 0] / total if first == 0 else torch.zeros_like(total)
    diagonal = weights.diagonal(past, -2, -1) / total
    before = weights.diagonal(past - 1, -2, -1)
    if past == 0:  # the first query of the block does not see the key before it
        before = F.pad(before, (1, 0))
    learned = 1 - moments[..., 0] / total
    return peak, sink, diagonal, before / total, i[:, 0] - first - mean, entropy, learned


def head_attention(heads: Heads, head: int, queries: slice) -> Tensor:
    """Return the attention ``[B, queries, queries.stop]`` of some queries of one head, float32."""
    q, k, slopes = heads.rotated_q, heads.rotated_k, head_slopes(heads)
    kv = head // heads.queries_per_key
    mask = Mask(heads.encoding.window, slopes=None if slopes is None else slopes[head : head + 1])
    softmax = heads.softmax
    if heads.sinks is not None:
        softmax = softmax._replace(sinks=heads.sinks[head : head + 1])
    attention = probabilities(
        q[:, head : head + 1, queries],
        k[:, kv : kv + 1, : queries.stop],
        mask,
        softmax,
        scaling=heads.scaling,
    )
    return attention[:, 0]


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


@dataclass(frozen=True)
class SampledAttention:
    """Attention of some queries of one head, with all pairs or without one pair's part of the
    scores.

    ``q`` ``[B, n, D]``: encoded queries at ``positions`` ``[n]``, evenly spread over the last
    three quarters of the training length, the text or the window, whichever is shortest, so
    that each query sees all keys before it. ``k`` ``[B, T, D]``: encoded keys from the first on.
    ``pairs``: number of pairs of the head's spectrum.
    """

    heads: Heads
    head: int
    kv_head: int
    pairs: int
    positions: Tensor
    q: Tensor
    k: Tensor

    def weights(self, without: int | None = None) -> Tensor:
        """Return the attention ``[B, n, T]`` on every key; ``without``: the pair to leave out of
        the scores."""
        heads, positions = self.heads, self.positions[:, None]
        products = self.q @ self.k.mT
        if without is not None:
            channels = [without, without + self.pairs]
            products = products - self.q[..., channels] @ self.k[..., channels].mT
        slopes = head_slopes(heads)
        slope = 0.0 if slopes is None else float(slopes[self.head])
        keys = torch.arange(self.k.shape[1], device=positions.device)
        scores = capped(products * heads.scale, heads.softcap) + slope * (keys - positions)
        scores = scores.masked_fill(keys > positions, -torch.inf)
        if heads.sinks is not None:
            scores = F.pad(scores, (0, 1), value=float(heads.sinks[self.head]))
        return scores.softmax(dim=-1)[..., : len(keys)]


def sampled_attention(heads: Heads, head: int) -> SampledAttention | None:
    """Choose the queries of one query head; return None if they would see only their own key."""
    length = min(heads.q.shape[2], heads.training_length, heads.encoding.window or heads.q.shape[2])
    if length < 2:
        return None
    kv = head // heads.queries_per_key
    start = max(1, length // 4)
    count = min(QUERIES, length - start)
    positions = torch.linspace(start, length - 1, count, device=heads.q.device).round().long()
    q, k = heads.rotated_q[:, head, positions], heads.rotated_k[:, kv, :length]
    pairs = len(heads.encoding.spectra[kv].inv_freq)
    return SampledAttention(
        heads=heads, head=head, kv_head=kv, pairs=pairs, positions=positions, q=q, k=k
    )


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


def _mean(values: Sequence[float]) -> float:
    """Return the mean of one value or more."""
    return sum(values) / len(values)


MEASURES: dict[str, Callable[[Sequence[float]], float]] = {
    "sink_mass": _mean,
    "entropy": _mean,
    "distance": _mean,
    "largest_logit": max,
    "stable_rank": _mean,
}
"""Measures of :func:`probe`, with the function that reduces the values of all layers to one."""
SCORES = 2**22
"""Scores computed at a time."""


@torch.no_grad()
def probe(model: LanguageModel, ids: Tensor) -> dict[str, list[float]]:
    """Read ``ids`` ``[B, T]``, T >= 2, and return each of :data:`MEASURES` for every layer.

    The five are cheap enough to be computed during training: attention on the first token
    (attention sinks, Xiao et al. 2024), entropy, whose collapse comes with instability (Zhai et al.
    2023), the largest logit, whose growth does too (Dehghani et al. 2023), the distance attended
    over, and the stable rank of the keys (Rudelson and Vershynin 2007). All use encoded queries and
    keys.

    ``sink_mass``, ``entropy`` (1: uniform over the visible keys) and ``distance`` (tokens) are
    means over heads and over all queries except the first, which sees only itself. Entropy and
    distance leave out the weight of a learned sink. ``largest_logit``: the largest score of these
    queries, q k / sqrt(D) in most models. ``stable_rank``: squared Frobenius norm of a head's keys
    ``[T, D]`` over their squared spectral norm, mean over heads and sequences.
    """
    measured: list[dict[str, Tensor]] = []
    grams = []

    def look(heads: Heads) -> None:
        measured.append(attention_measures(heads))
        grams.append(heads.rotated_k.mT @ heads.rotated_k)

    with observing(model, look):
        model(ids.to(model.device), last=1)
    by_name = {name: torch.stack([layer[name] for layer in measured]) for name in measured[0]}
    by_name["stable_rank"] = stable_rank(torch.stack(grams)).mean(dim=(1, 2))
    # One host sync for all measures of all layers.
    rows = torch.stack([by_name[name] for name in MEASURES]).tolist()
    return dict(zip(MEASURES, rows, strict=True))


def attention_measures(heads: Heads) -> dict[str, Tensor]:
    """Compute each measure of :func:`probe` on one layer, as a scalar, except the stable rank.

    Queries are read in blocks; with a window, each block reads only the keys that it can see.
    """
    k = heads.rotated_k[:, :, None]
    q = heads.rotated_q.unflatten(1, (k.shape[1], -1)) * heads.scale
    B, H, G, T, _ = q.shape
    window = heads.encoding.window or T
    slopes = head_slopes(heads)
    if slopes is not None:
        slopes = slopes.view(H, G, 1, 1)
    sums = {name: q.new_zeros(()) for name in ("sink_mass", "entropy", "distance")}
    largest = q.new_full((), -math.inf)
    # A block reads the keys of its window and its own, so at most twice the window.
    size = max(1, min(window, SCORES // (B * H * G * min(T, 2 * window))))
    for start in range(1, T, size):
        stop = min(start + size, T)
        first = max(0, start - window + 1)
        i = torch.arange(start, stop, device=q.device)[:, None]
        away = i - torch.arange(first, stop, device=q.device)
        hidden = (away < 0) | (away >= window)
        scores = capped(q[..., start:stop, :] @ k[..., first:stop, :].mT, heads.softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        largest = torch.maximum(largest, scores.amax())
        scores = scores if slopes is None else scores - slopes * away
        attention = scores.softmax(dim=-1)
        first_key = attention[..., 0] if first == 0 else attention.new_zeros(())
        if heads.sinks is not None:
            first_key = first_key * (scores.logsumexp(dim=-1) - heads.sinks.view(H, G, 1)).sigmoid()
        # A query that sees only itself has entropy 0; the clamp avoids 0 / 0.
        most = (i + 1).clamp(max=window).log().clamp(min=1e-6)
        sums["sink_mass"] += first_key.sum()
        sums["entropy"] += (torch.special.entr(attention) / most).sum()
        sums["distance"] += (attention * away).sum()
    rows = B * H * G * (T - 1)
    return {name: total / rows for name, total in sums.items()} | {"largest_logit": largest}


def stable_rank(gram: Tensor) -> Tensor:
    """Compute the stable ranks of matrices K ``[..., T, D]`` from K^T K ``[..., D, D]``; NaN for a
    K that is zero or not finite."""
    # eigvalsh raises an error for values that are not finite.
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    gram = torch.where(finite, gram, 0.0)
    return gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / torch.linalg.eigvalsh(gram)[..., -1]
