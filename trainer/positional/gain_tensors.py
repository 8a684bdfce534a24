"""Gains as tensors of a forward pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from trainer.positional.gains import Factors

PERIOD = 4096
"""Positions after which the noise repeats."""


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
