"""Key-value cache for generation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer, ``[B, Hkv, capacity, D]``, filled up to ``length``.

    Keys are encoded, except where :func:`~trainer.model.plan.caches_plain_keys` is true.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[B, Hkv, T, D]``; return all keys and values so far, or raise a ValueError if
        the capacity is exceeded."""
        end = self.length + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"a cache for {self.keys.shape[2]} tokens cannot hold {end}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class KVCache:
    """One :class:`LayerCache` per layer, filled by the decoder.

    All rows end in the same column; shorter rows begin later, in the columns ``begins`` (empty: all
    begin at 0). Thus one copy appends a token to all rows, and columns are as far apart as tokens.
    """

    layers: list[LayerCache]
    begins: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Number of filled columns: tokens of the longest row."""
        return self.layers[0].length

    def part(self, first: int, rows: int, begin: int = 0) -> "KVCache":
        """Return neighbouring rows from column ``begin``, sharing memory, not filled yet."""
        place = slice(first, first + rows), slice(None), slice(begin, None)
        layers = [LayerCache(x.keys[place], x.values[place]) for x in self.layers]
        begins = [max(column - begin, 0) for column in self.begins[first : first + rows]]
        return KVCache(layers, tuple(begins) if any(begins) else ())

    def fill(self, begins: tuple[int, ...], length: int) -> None:
        """Mark all rows as filled (by :meth:`part`) from ``begins`` to ``length``."""
        self.begins = begins if any(begins) else ()
        for layer in self.layers:
            layer.length = length

    def copy_from(self, other: "KVCache", length: int, rows: Sequence[int]) -> None:
        """Fill with the first ``length`` columns of ``rows`` of another cache."""
        index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.keys[:, :, :length] = source.keys[index, :, :length]
            layer.values[:, :, :length] = source.values[index, :, :length]
        self.fill((), length)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Remove all rows but these; return the rows in their new order.

        The last ones move to the places of removed ones: other rows are not copied.
        """
        count = len(rows)
        free = sorted(set(range(count)).difference(rows))
        moved_rows = sorted((row for row in rows if row >= count), reverse=True)
        moves = list(zip(free, moved_rows, strict=True))
        order = list(range(count))
        for place, row in moves:
            order[place] = row
        if moves:
            to, moved = torch.tensor(moves, device=self.layers[0].keys.device).T
            for layer in self.layers:
                for stored in (layer.keys, layer.values):
                    stored[to, :, : layer.length] = stored[moved, :, : layer.length]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:count], layer.values[:count]
        if self.begins:
            self.begins = tuple(self.begins[row] for row in order)
        return order
