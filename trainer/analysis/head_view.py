"""One query head and the keys that it reads, before their encoding: its channels along a text, and
the points of its pairs (Rotary Offset Features, Fig. 1, 7, 12 and 13)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.grids import cell_means

POINTS, CELLS = 1000, 256
"""The most tokens that points are kept of, and the most cells of a map."""


@dataclass(frozen=True)
class HeadView:
    """Of the first text. Pair m of ``pairs`` is channels m and m + pairs.

    ``query``, ``key``: ``[n, D]``, one in ``step`` tokens. ``query_map``, ``key_map``:
    ``[D, cells]``, means over ``cell`` neighbouring tokens.
    """

    layer: int
    head: int
    pairs: int
    step: int
    cell: int
    query: Array
    key: Array
    query_map: Array
    key_map: Array

    def points(self, pair: int) -> tuple[Array, Array]:
        """Queries and keys of one pair, ``[n, 2]`` each."""
        channels = [pair, pair + self.pairs]
        return self.query[:, channels], self.key[:, channels]


def head_view(heads: Heads, head: int) -> HeadView:
    """Of query head ``head``; what it keeps does not grow with the text."""
    kv, length = head // heads.queries_per_key, heads.q.shape[2]
    of_q, of_k = heads.q[0, head], heads.k[0, kv]
    step, cell = -(-length // POINTS), -(-length // CELLS)
    sampled = [x[::step].cpu().numpy().copy() for x in (of_q, of_k)]
    maps = [cell_means(x.T, cell).cpu().numpy() for x in (of_q, of_k)]
    pairs = len(heads.encoding.spectra[kv].inv_freq)
    return HeadView(heads.layer, head, pairs, step, cell, *sampled, *maps)
