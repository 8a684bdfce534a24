"""Keys and values of the tokens already read, for generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.config import ModelConfig


@dataclass
class LayerCache:
    """Keys and values of one layer, ``[B, Hkv, capacity, D]``, filled up to ``length``.

    Keys are rotated, but for layers whose frequencies follow the length of the sequence, or whose
    query heads have spectra of their own: those keep them as they were before. ``begins``: see
    :class:`KVCache`.
    """

    keys: Tensor
    values: Tensor
    length: int = 0
    begins: tuple[int, ...] = ()

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``[B, Hkv, T, D]`` and return everything so far.

        Raises:
            ValueError: there is no room.
        """
        end = self.length + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"a cache for {self.keys.shape[2]} tokens cannot hold {end}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class KVCache:
    """One :class:`LayerCache` a layer, filled by the decoder.

    All rows end in the same column. Rows of fewer tokens begin later, in the columns ``begins``,
    so that a token is appended to all with one copy and distances are those of the columns.
    """

    layers: list[LayerCache]

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Room for ``capacity`` tokens in each of ``batch`` rows."""
        shape = batch, config.num_key_value_heads, capacity, config.head_size

        # Zeros, since a probability of 0 times whatever lies in columns before a row begins is NaN
        # where that is.
        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls([LayerCache(zeros(), zeros()) for _ in range(config.num_hidden_layers)])

    @property
    def begins(self) -> tuple[int, ...]:
        """The first column of every row; empty where that is 0 for all."""
        return self.layers[0].begins

    @property
    def length(self) -> int:
        """Columns that are filled: tokens of the longest row."""
        return self.layers[0].length

    def part(self, first: int, rows: int, begin: int) -> KVCache:
        """Neighbouring rows from column ``begin`` on, in shared memory and not filled yet."""
        return KVCache(
            [
                LayerCache(
                    layer.keys[first : first + rows, :, begin:],
                    layer.values[first : first + rows, :, begin:],
                )
                for layer in self.layers
            ]
        )

    def fill(self, begins: tuple[int, ...], length: int) -> None:
        """Say that :meth:`part` by part all rows were filled from ``begins`` up to ``length``."""
        for layer in self.layers:
            layer.begins = begins if any(begins) else ()
            layer.length = length

    def remove(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[row, :, : layer.length] = kept[-1, :, : layer.length]
            layer.keys, layer.values = layer.keys[:-1], layer.values[:-1]
            if layer.begins:
                begins = list(layer.begins)
                begins[row] = begins[-1]
                layer.begins = tuple(begins[:-1])
