"""How stable the angles of a pair are beside how long its mean is (Rotary Offset Features, Fig. 2).

The circular variance of angles a_1 .. a_n is 1 - |mean of exp(i a)|: 0 where all are equal, 1 where
they cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.averages import Array, Averages
from trainer.analysis.capture import Heads
from trainer.positional.spectrum import Spectrum

COLUMNS = "of_keys", "layer", "head", "pair", "radius", "variance"


@dataclass(frozen=True)
class Stability:
    """Every rotated pair of every query head and of every key-value head, one entry each.

    ``of_keys``: whether of keys, whose ``head`` is a key-value head. ``radius``: length of the mean
    over all positions, before the encoding; ``variance``: the circular variance of its angles.
    """

    of_keys: Array
    layer: Array
    head: Array
    pair: Array
    radius: Array
    variance: Array


class AngleStability:
    """Collects means, and means of directions, of every layer before its encoding."""

    def __init__(self) -> None:
        self._averages = Averages()
        self._spectra: dict[int, tuple[Spectrum, ...]] = {}
        self._group = 1

    def update(self, heads: Heads) -> None:
        """Take in one layer of one or more texts."""
        spectra = heads.encoding.spectra
        self._spectra[heads.layer], self._group = spectra, heads.queries_per_key
        q = [_means(x, spectra[i // self._group]) for i, x in enumerate(heads.q.unbind(1))]
        k = [_means(x, spectra[i]) for i, x in enumerate(heads.k.unbind(1))]
        self._averages.add(heads.layer, q=torch.stack(q, dim=1), k=torch.stack(k, dim=1))

    def result(self) -> Stability:
        """Of all positions and texts taken in."""
        columns: dict[str, list[Array]] = {name: [] for name in COLUMNS}
        for name in ("q", "k"):
            for layer, of_layer in zip(
                self._averages.layers, self._averages.stacked(name), strict=True
            ):
                for head, (mean, direction) in enumerate(of_layer):
                    spectrum = self._spectra[layer][head // (self._group if name == "q" else 1)]
                    moving = np.flatnonzero(spectrum.inv_freq)
                    values = (
                        np.full(len(moving), name == "k"),
                        np.full(len(moving), layer),
                        np.full(len(moving), head),
                        moving,
                        np.hypot(*mean[:, moving]),
                        1 - np.hypot(*direction[:, moving]),
                    )
                    for column, value in zip(COLUMNS, values, strict=True):
                        columns[column].append(value)
        return Stability(**{name: np.concatenate(parts) for name, parts in columns.items()})


def _means(x: Tensor, spectrum: Spectrum) -> Tensor:
    """Of one head ``[B, T, D]``: the mean and the mean direction of every pair, ``[B, 2, 2, D/2]``,
    with zeros behind those that the spectrum has."""
    pairs = len(spectrum.inv_freq)
    channels = torch.stack([x[..., :pairs], x[..., pairs : 2 * pairs]], dim=1)
    length = channels.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    found = [of.mean(dim=2, dtype=torch.float64) for of in (channels, channels / length)]
    return torch.nn.functional.pad(torch.stack(found, dim=1), (0, x.shape[-1] // 2 - pairs))
