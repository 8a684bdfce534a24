"""Sink tokens: their short keys, and the attention on them (RoPE-ID Sec. 3.2, Fig. 5, 6, 9)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, bucket_means, position_edges
from trainer.analysis.attention import Rows, head_attention
from trainer.analysis.capture import Heads


@dataclass(frozen=True)
class SinkCurves:
    """Means within buckets of positions, ``[layers, query heads, buckets]``.

    ``key_dot``: mean dot product of a key with its own query and all later ones, by the key's
    position. ``sink_weight``: attention on the first key, and ``peak``: largest dot product with a
    key, both by the query's position, which is the length of the text so far.
    """

    key_dot: Array
    sink_weight: Array
    peak: Array


@dataclass(frozen=True)
class SinkResult:
    """Curves and norms by position: bucket b holds positions ``edges[b]`` to ``edges[b + 1] - 1``;
    the first 16 positions have a bucket each.

    ``key_norm``: ``[layers, key-value heads, buckets]`` by the key's position.
    """

    layers: list[int]
    edges: list[int]
    key_norm: Array
    plain: SinkCurves
    rotated: SinkCurves


def _key_dot(q: Tensor, k: Tensor) -> Tensor:
    """Compute the mean of q_i k_j over i >= j, ``[B, Hq, T]``: each key times the mean of its
    queries."""
    T = q.shape[2]
    later = q.double().flip(2).cumsum(dim=2).flip(2)
    later /= torch.arange(T, 0, -1, device=q.device)[:, None]
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (later * shared).sum(dim=-1)


class Sinks:
    """Collect norms, dot products and sink weights of every layer."""

    def __init__(self) -> None:
        self.edges: list[int] = []
        self._averages = Averages()

    def update(self, heads: Heads, plain: Rows, rotated: Rows) -> None:
        """Add one layer and its rows of attention without and with the encoding."""
        self.edges = position_edges(heads.q.shape[2])
        values = {"key_norm": heads.k.norm(dim=-1)}
        for name, rows, q, k in (
            ("plain", plain, heads.q, heads.k),
            ("rotated", rotated, heads.rotated_q, heads.rotated_k),
        ):
            values[f"{name}.key_dot"] = _key_dot(q, k)
            values[f"{name}.sink_weight"] = rows.sink
            values[f"{name}.peak"] = rows.peak
        bucketed = {name: bucket_means(value, self.edges) for name, value in values.items()}
        self._averages.add(heads.layer, **bucketed)

    def result(self) -> SinkResult:
        """Return means over the texts added so far."""
        stacked = self._averages.stacked

        def curves(name: str) -> SinkCurves:
            return SinkCurves(
                **{key: stacked(f"{name}.{key}") for key in SinkCurves.__annotations__}
            )

        return SinkResult(
            self._averages.layers,
            self.edges,
            stacked("key_norm"),
            curves("plain"),
            curves("rotated"),
        )


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
