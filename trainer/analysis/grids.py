"""Positions at which analyses report: doubling prefixes, and widening buckets."""

from __future__ import annotations

import torch
from torch import Tensor


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
