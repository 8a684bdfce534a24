"""Means over texts of what an analysis finds in every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.positional.layout import LayerEncoding

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


def prefix_lengths(length: int) -> list[int]:
    """32, twice that, and so on below ``length``, and ``length`` itself."""
    lengths = []
    n = 32
    while n < length:
        lengths.append(n)
        n *= 2
    return [*lengths, length]


def position_edges(length: int, per_octave: int = 16) -> list[int]:
    """Edges of buckets of positions: single positions at first, then ``per_octave`` buckets while
    the position doubles, so that a first key stands alone and a long text stays a short list."""
    edges = list(range(min(per_octave, length) + 1))
    step = 1
    while edges[-1] < length:
        edge = round(per_octave * 2 ** (step / per_octave))
        if edge > edges[-1]:
            edges.append(min(edge, length))
        step += 1
    return edges


def bucket_means(values: Tensor, edges: list[int]) -> Tensor:
    """Means ``[..., len(edges) - 1]`` of ``values`` ``[..., T]`` between the edges, float64."""
    at = torch.tensor(edges, device=values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))[..., at]
    return sums.diff(dim=-1) / at.diff()


def cell_means(values: Tensor, cell: int) -> Tensor:
    """``[..., cells]`` means of ``values`` ``[..., T]`` over ``cell`` neighbours each; the last
    cell may have fewer."""
    return torch.stack([part.mean(dim=-1) for part in values.split(cell, dim=-1)], dim=-1)


Side = Literal["query", "key"]


def pair_counts(encoding: LayerEncoding, heads: int, head_dim: int) -> tuple[int, ...]:
    """Pairs of each of ``heads`` query or key heads of a layer.

    A head without rotation is read as pairs (m, m + head_dim / 2), as if all of it rotated.
    """
    per_key = heads // len(encoding.spectra)
    return tuple(
        len(spectrum.inv_freq) or head_dim // 2
        for spectrum in encoding.spectra
        for _ in range(per_key)
    )


def pair_norms(x: Tensor, pairs: int) -> Tensor:
    """l2 norms of the first ``pairs`` pairs of ``x`` ``[..., T, D]`` along it: ``[..., pairs, T]``.

    A rotation leaves them as they are.
    """
    return torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs]).transpose(-2, -1)


def of_pairs(rows: Sequence[Tensor]) -> Tensor:
    """One number a pair for every head, ``[H, pairs]``; NaN where a head has fewer pairs."""
    return pad_sequence(list(rows), batch_first=True, padding_value=math.nan)


def stacked(layers: Sequence[Tensor]) -> Array:
    """``[layers, H, n]`` of ``[H, n]`` each; NaN where a layer has fewer than another."""
    return of_pairs([layer.T for layer in layers]).mT.cpu().numpy()


def known(values: Array) -> Array:
    """The finite values, flattened."""
    return values[np.isfinite(values)]


def mean_over_heads(values: Array) -> Array:
    """``[layers, n]`` of ``[layers, H, n]``; NaN where no head has a number."""
    return np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)


def plain(values: Array) -> list[Any]:
    """Nested lists, of floats with six decimals and None for NaN."""
    found = (values.round(6) if values.dtype.kind == "f" else values).astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()
