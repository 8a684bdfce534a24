"""Means over texts of what an analysis finds in every layer."""

from __future__ import annotations

import numpy as np
from torch import Tensor

Array = np.ndarray


class Averages:
    """Named arrays by layer, averaged over all the texts they were found in, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, Array]] = {}
        self._counts: dict[str, dict[int, int]] = {}

    def add(self, layer: int, **values: Tensor) -> None:
        """Take in ``values`` ``[B, ...]`` of one layer, of one shape behind B in all calls.

        Raises:
            ValueError: the shape is another than before, as after a text of another length.
        """
        for name, value in values.items():
            total = value.double().sum(dim=0).cpu().numpy()
            sums = self._sums.setdefault(name, {})
            counts = self._counts.setdefault(name, {})
            if layer in sums:
                if sums[layer].shape != total.shape:
                    raise ValueError(
                        f"{name}: shape {total.shape} after {sums[layer].shape}; "
                        "texts of one analysis must be equally long"
                    )
                total = total + sums[layer]
            sums[layer] = total
            counts[layer] = counts.get(layer, 0) + value.shape[0]

    def stacked(self, name: str) -> Array:
        """Means ``[layers, ...]``, from the first layer seen to the last."""
        sums, counts = self._sums[name], self._counts[name]
        return np.stack([sums[layer] / counts[layer] for layer in sorted(sums)])

    @property
    def layers(self) -> list[int]:
        """The layers seen, ascending; the rows of :meth:`stacked`."""
        return sorted({layer for sums in self._sums.values() for layer in sums})
