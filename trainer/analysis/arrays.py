"""Arrays that studies share: averages over texts, prefix lengths, buckets of positions, channel
pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.positional.layout import LayerEncoding

Array = np.ndarray


def stacked(
    layers: Sequence[Mapping[str, Tensor]], within: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, Array]:
    """Return means over texts ``[layers, ...]``, float64, from the values ``[B, ...]`` of every
    layer.

    ``within``: values of the same texts' first tokens, read without the later ones. They replace
    the first entries of the last axis.
    """
    means = {
        name: np.stack([layer[name].double().mean(dim=0).cpu().numpy() for layer in layers])
        for name in layers[0]
    }
    for name, values in (stacked(within) if within else {}).items():
        means[name][..., : values.shape[-1]] = values
    return means


def prefix_lengths(length: int) -> list[int]:
    """Return 32, 64, 128 and so on below ``length``, and ``length`` itself."""
    lengths = []
    n = 32
    while n < length:
        lengths.append(n)
        n *= 2
    return [*lengths, length]


def position_edges(length: int, per_octave: int = 16) -> list[int]:
    """Return the edges of buckets of positions.

    The first ``per_octave`` positions have a bucket each; after that, every doubling of the
    position has ``per_octave`` buckets. The first key stays alone, and a long text stays a short
    list.
    """
    edges = list(range(min(per_octave, length) + 1))
    step = 1
    while edges[-1] < length:
        edge = round(per_octave * 2 ** (step / per_octave))
        if edge > edges[-1]:
            edges.append(min(edge, length))
        step += 1
    return edges


def bucket_means(values: Tensor, edges: list[int]) -> Tensor:
    """Return the means ``[..., len(edges) - 1]`` of ``values`` ``[..., T]`` between the edges,
    float64."""
    bounds = torch.tensor(edges, device=values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))[..., bounds]
    return sums.diff(dim=-1) / bounds.diff()


def cell_means(values: Tensor, cell: int) -> Tensor:
    """Return means ``[..., cells]`` of ``values`` ``[..., T]`` over ``cell`` neighbours; the last
    cell may be smaller."""
    return torch.stack([part.mean(dim=-1) for part in values.split(cell, dim=-1)], dim=-1)


Side = Literal["query", "key"]
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
"""Plurals of both sides."""


def pair_counts(encoding: LayerEncoding, heads: int, head_dim: int) -> tuple[int, ...]:
    """Count the rotary pairs of each of ``heads`` query or key heads of a layer.

    Pair m of M is channels m and m + M. A head without rotation is read as pairs (m, m + head_dim /
    2), as if all its channels rotated.
    """
    per_key = heads // len(encoding.spectra)
    return tuple(
        len(spectrum.inv_freq) or head_dim // 2
        for spectrum in encoding.spectra
        for _ in range(per_key)
    )


def pair_norms(x: Tensor, pairs: int) -> Tensor:
    """Return l2 norms ``[..., pairs, T]`` of the first ``pairs`` pairs of ``x`` ``[..., T, D]``.

    A rotation does not change them.
    """
    return torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs]).transpose(-2, -1)


def stack_heads(rows: Sequence[Tensor]) -> Tensor:
    """Stack one number a pair for every head, ``[H, pairs]``; NaN where a head has fewer pairs."""
    return pad_sequence(list(rows), batch_first=True, padding_value=math.nan)


def stack_layers(layers: Sequence[Tensor]) -> Array:
    """Stack ``[H, n]`` of every layer to ``[layers, H, n]``; NaN if a layer has fewer columns."""
    return stack_heads([layer.T for layer in layers]).mT.cpu().numpy()


Place = tuple[int, int]
"""Layer and head."""
