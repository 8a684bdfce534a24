"""Keys and values of the tokens already read, for generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LayerCache:
    """Rotated keys and values of one layer, ``[B, Hkv, capacity, D]``, filled up to ``length``.

    The buffers double when full, so that appending is linear in the tokens. Rotated keys are right
    as long as the frequencies do not change with the length, which holds for every encoding that
    is not rescaled while it generates.
    """

    length: int = 0
    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``[B, Hkv, T, D]`` and return everything so far."""
        end = self.length + k.shape[2]
        if self.keys is None or self.values is None or end > self.keys.shape[2]:
            self.keys = self._grown(self.keys, k, 2 * end)
            self.values = self._grown(self.values, v, 2 * end)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        new = like.new_empty(*like.shape[:2], capacity, like.shape[3])
        if old is not None:
            new[:, :, : self.length] = old[:, :, : self.length]
        return new


@dataclass
class KVCache:
    """One :class:`LayerCache` a layer; made empty, filled by the decoder."""

    layers: list[LayerCache] = field(default_factory=list)

    @classmethod
    def empty(cls, num_layers: int) -> KVCache:
        """A cache for a decoder of that depth."""
        return cls([LayerCache() for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length
