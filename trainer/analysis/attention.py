"""Queries and keys of every layer from one forward pass, and the attention that they make.

Scores are computed and reduced in blocks: no function holds more rows than it is asked for.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerEncoding
from trainer.positional.rotation import bias_slopes

Array = np.ndarray
Measured = TypeVar("Measured")
Name = TypeVar("Name")
HeadIndex = tuple[int, int]
"""Numbers of a layer and of a query head in it."""
Side = Literal["query", "key"]
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
"""Plurals of both sides."""


@dataclass(frozen=True)
class Heads:
    """Queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, T, D]`` of one layer, float32.

    ``q``, ``k``: before the encoding, after QK-norm if the layer has it; ``rotated_q``,
    ``rotated_k``: as the scores use them, temperature and gains included. ``encoding``: the layer's
    encoding, in a model of ``training_length`` C. Query head h reads key-value head h // (Hq /
    Hkv); in a layer with a spectrum for every query head, Hkv equals Hq.

    A score is ``scaling`` q k (None: q k / sqrt(D)); with a ``softcap`` c (Gemma 2) it is c
    tanh(score / c). ``sinks`` ``[Hq]``: logits of learned sinks, which the softmax adds to the
    scores; None without them.
    """

    layer: int
    encoding: LayerEncoding
    q: Tensor
    k: Tensor
    rotated_q: Tensor
    rotated_k: Tensor
    training_length: int
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        """Factor on the dot product of a query and a key."""
        return self.q.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def states(self, *, rotated: bool) -> tuple[Tensor, Tensor]:
        """Return queries and keys, as the scores use them or before their encoding."""
        return (self.rotated_q, self.rotated_k) if rotated else (self.q, self.k)

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that read one key-value head."""
        return self.q.shape[1] // self.k.shape[1]

    def capped(self, scores: Tensor) -> Tensor:
        """Bound scaled scores by the soft-cap, if there is one."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


@dataclass(frozen=True)
class NeedlePrompt:
    """Prompts ``ids`` ``[B, T]`` that state a fact at ``needle`` and end with a question of
    ``question`` tokens about it."""

    ids: Tensor
    needle: slice
    question: int = 1


@torch.no_grad()
def capture(
    model: LanguageModel, ids: Tensor, measure: Callable[[Heads], Measured]
) -> list[Measured]:
    """Read ``ids`` ``[B, T]``, and return what ``measure`` gives for each layer before its
    attention; tensors that it does not return are freed before the next layer."""
    layers = model.layout.layers
    C = model.layout.training_length
    measured: list[Measured] = []

    def observe(layer: int, *tensors: Tensor, sinks: Tensor | None = None, **scores: Any) -> None:
        q, k, rotated_q, rotated_k = (x.float() for x in tensors)
        sinks = None if sinks is None else sinks.detach().float()
        heads = Heads(layer, layers[layer], q, k, rotated_q, rotated_k, C, sinks=sinks, **scores)
        measured.append(measure(heads))

    with model.observed(observe):
        model.hidden_states(ids.to(model.device))
    return measured


def view_heads(
    model: LanguageModel,
    ids: Tensor,
    places: Sequence[HeadIndex],
    view: Callable[[Heads, int], Measured],
) -> dict[HeadIndex, Measured]:
    """Read ``ids`` ``[B, T]``, and return what ``view`` gives for a layer and the number of a head,
    for each of ``places`` in their order."""

    def measure(heads: Heads) -> dict[HeadIndex, Measured]:
        return {(i, head): view(heads, head) for i, head in places if i == heads.layer}

    viewed: dict[HeadIndex, Measured] = {}
    for of_layer in capture(model, ids, measure):
        viewed |= of_layer
    return {place: viewed[place] for place in places}


def head_vectors(heads: Heads, head: int) -> dict[Side, Tensor]:
    """Return the queries of a head and the keys that it reads in the first text, ``[T, D]`` on the
    CPU, before their encoding."""
    key = heads.k[0, head // heads.queries_per_key]
    return {"query": heads.q[0, head].clone().cpu(), "key": key.clone().cpu()}


def pair_counts(encoding: LayerEncoding, heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the number of rotary pairs of each of ``heads`` query or key heads of a layer.

    A head without rotation counts as if all its channels rotated.
    """
    per_key = heads // len(encoding.spectra)
    counts: list[int] = []
    for spectrum in encoding.spectra:
        counts += [len(spectrum.inv_freq) or head_dim // 2] * per_key
    return tuple(counts)


def pair_norms(x: Tensor, pairs: int) -> Tensor:
    """Return l2 norms ``[..., pairs, T]`` of the first pairs of ``x`` ``[..., T, D]``."""
    return torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs]).transpose(-2, -1)


def stack_heads(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of ``[pairs]`` to ``[H, pairs]``; NaN where a head has fewer pairs."""
    return pad_sequence(list(rows), batch_first=True, padding_value=math.nan)


def stack_layers(layers: Sequence[Tensor]) -> Array:
    """Stack ``[H, n]`` of every layer to ``[layers, H, n]``; NaN if a layer has fewer columns."""
    return stack_heads([layer.T for layer in layers]).mT.cpu().numpy()


def by_name(layers: Sequence[Mapping[Name, Measured]]) -> dict[Name, list[Measured]]:
    """Return what each layer has under a name as one list."""
    lists = {}
    for name in layers[0]:
        lists[name] = [layer[name] for layer in layers]
    return lists


BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Scores computed at a time: on a CPU 2 MiB, which fit in a core's cache; on a GPU 64 MiB, so that
long texts need few kernels."""

# Finite, so that its product with a probability of 0 is 0; exp of it is 0 in float32.
HIDDEN = -1e30


@dataclass(frozen=True)
class AttentionStatistics:
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


def visible_keys(length: int, window: int | None, device: torch.device) -> Tensor:
    """Count the keys that every query sees ``[T]``, its own included."""
    return torch.arange(1, length + 1, device=device).clamp(max=window or length)


def attention_statistics(heads: Heads, *, rotated: bool = True) -> AttentionStatistics:
    """Compute the statistics of a layer block by block.

    ``rotated``: use the encoded queries and keys, as the layer attends. False: use them before
    their encoding, without ALiBi's bias, within the same window.
    """
    q, k = heads.states(rotated=rotated)
    B, Hq, T = q.shape[:3]
    group = heads.queries_per_key
    window = heads.encoding.window
    slopes = bias_slopes(Hq, heads.encoding.biased, q.device) if rotated else None
    empty = (q.new_empty(B, Hq, T) for _ in fields(AttentionStatistics)[1:])
    rows = AttentionStatistics(visible_keys(T, window, q.device), *empty)
    size = max(16, min(512, BLOCK_ELEMENTS[q.device.type] // (group * T)))
    for b, kv, start in product(range(B), range(k.shape[1]), range(0, T, size)):
        shared = slice(kv * group, (kv + 1) * group)  # the query heads that read this key head
        stop = min(start + size, T)
        block = b, shared, slice(start, stop)
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
        rows.peak[block] = scores.amax(dim=-1) / heads.scale
        if heads.softcap is not None:
            scores = heads.capped(scores).masked_fill_(scores == HIDDEN, HIDDEN)
        if slopes is not None:
            scores += slopes[shared, None, None] * (j - i)
        top = scores.amax(dim=-1, keepdim=True)
        scores -= top
        weights = scores.exp()
        # One product gives the totals and first moments of all rows.
        moments = weights @ torch.stack([torch.ones_like(j), j - first], dim=1).to(weights.dtype)
        keys = moments[..., 0]
        mean = moments[..., 1] / keys
        rows.distance[block] = i[:, 0] - first - mean
        rows.entropy[block] = keys.log() - (weights * scores).sum(dim=-1) / keys
        total = keys
        if heads.sinks is not None:
            total = keys + (heads.sinks[shared, None] - top[..., 0]).exp()
        rows.learned[block] = 1 - keys / total
        rows.sink[block] = weights[..., 0] / total if first == 0 else 0
        before = weights.diagonal(past - 1, -2, -1)
        if past == 0:  # the first query of the block does not see the key before it
            before = F.pad(before, (1, 0))
        rows.previous[block] = before / total
        rows.diagonal[block] = weights.diagonal(past, -2, -1) / total
    return rows


def head_attention(
    heads: Heads, head: int, queries: slice | Tensor, *, without: int | None = None
) -> Tensor:
    """Return the attention ``[B, n, keys]`` of one head's queries at n positions, float32, on the
    keys up to the last of these positions.

    ``queries``: positions, ascending. ``without``: a pair whose part of the scores is left out.
    """
    kv = head // heads.queries_per_key
    positions = torch.arange(heads.q.shape[2])[queries]
    last = int(positions[-1])
    q = heads.rotated_q[:, head, queries]
    k = heads.rotated_k[:, kv, : last + 1]
    i = positions.to(q.device)[:, None]
    j = torch.arange(last + 1, device=q.device)
    scores = q @ k.mT
    if without is not None:
        pair = [without, without + len(heads.encoding.spectra[kv].inv_freq)]
        scores -= q[..., pair] @ k[..., pair].mT
    scores = heads.capped(scores * heads.scale)
    slopes = bias_slopes(heads.q.shape[1], heads.encoding.biased, q.device)
    if slopes is not None:
        scores += slopes[head] * (j - i)
    window = heads.encoding.window or last + 1
    scores.masked_fill_((j > i) | (j <= i - window), -torch.inf)
    if heads.sinks is not None:
        scores = F.pad(scores, (0, 1), value=float(heads.sinks[head]))
    return scores.softmax(dim=-1)[..., : last + 1]


def last_attention(heads: Heads, queries: int = 1) -> Tensor:
    """Return the attention ``[B, Hq, queries, T]`` of the last queries of every head."""
    last = slice(heads.q.shape[2] - queries, heads.q.shape[2])
    return torch.stack([head_attention(heads, h, last) for h in range(heads.q.shape[1])], dim=1)


def attention_blocks(heads: Heads, head: int, size: int = 256) -> Iterator[tuple[int, Tensor]]:
    """Yield the attention of ``size`` queries of a head at a time, see :func:`head_attention`,
    after the position of the first of them."""
    T = heads.q.shape[2]
    for start in range(0, T, size):
        yield start, head_attention(heads, head, slice(start, min(start + size, T)))


def attention_map(heads: Heads, head: int, *, size: int) -> Array:
    """Reduce a head's attention on the first text to a map of at most ``size`` cells a side.

    A cell covers ``ceil(T / size)`` queries and as many keys: it sums attention over its keys and
    averages over its queries.
    """
    T = heads.q.shape[2]
    cell = -(-T // size)
    cells = -(-T // cell)
    rows = []
    for _, attention in attention_blocks(heads, head, cell * max(1, 256 // cell)):
        padded = F.pad(attention[0], (0, cells * cell - attention.shape[-1]))
        keys = padded.unflatten(-1, (cells, cell)).sum(dim=-1)
        rows += [part.mean(dim=0) for part in keys.split(cell)]
    return torch.stack(rows).cpu().numpy()


def cell_means(values: Tensor, cell: int) -> Tensor:
    """Return means ``[..., cells]`` of ``values`` ``[..., T]`` over ``cell`` neighbours; the last
    cell may be smaller."""
    return torch.stack([part.mean(dim=-1) for part in values.split(cell, dim=-1)], dim=-1)
