"""Interventions on bands of heads: factors on channels of queries and keys, and noise in their
place (DoPE; Weighted RoPE).

A rotated pair shares one factor, so that a factor before the rotation is one after it. Gains are
made for an evaluation, and never stored with a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

PERIOD = 4096
"""Positions after which the noise repeats."""

Factors = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Gains:
    """What is done to the heads of one layer after the rotation.

    ``query``, ``key``: a factor for every channel of every head, ``[Hq][D]`` and ``[Hkv][D]``;
    empty: all 1. ``query_noise``, ``key_noise``: the standard deviation of Gaussian noise that is
    added to every channel of a head, ``[Hq]`` and ``[Hkv]``, where there are factors; empty: none.
    The noise is a fixed function of ``seed``, head and position.
    """

    query: Factors = ()
    key: Factors = ()
    query_noise: tuple[float, ...] = ()
    key_noise: tuple[float, ...] = ()
    seed: int = 0


@lru_cache
def factors(rows: Factors, device: torch.device) -> Tensor:
    """``[H, 1, D]`` float32."""
    return torch.tensor(rows, dtype=torch.float32, device=device)[:, None]


def noise(std: tuple[float, ...], size: int, seed: int, positions: Tensor) -> Tensor:
    """Noise of every head at ``positions`` ``[..., T]``: ``[..., H, T, size]`` float32."""
    table = _table(len(std), size, seed, positions.device)[:, positions % PERIOD]
    if positions.dim() == 2:
        table = table.transpose(0, 1)
    return table * factors(tuple((s,) for s in std), positions.device)


@lru_cache(maxsize=64)
def _table(heads: int, size: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, PERIOD, size, generator=generator).to(device)
