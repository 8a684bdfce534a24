"""The intervention of a layer, done to its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trainer.positional.intervention import Factors, Intervention

PERIOD = 4096
"""Positions after which the noise repeats."""


@dataclass(frozen=True)
class Intervene:
    """Changes encoded queries and keys as :class:`Intervention` say."""

    intervention: Intervention

    def __call__(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``[B, H, T, D]`` each, at positions ``[T]`` or ``[B, T]``."""
        intervention, seed = self.intervention, 2 * self.intervention.seed
        return (
            _changed(q, intervention.query, intervention.query_noise, seed, q_positions),
            _changed(k, intervention.key, intervention.key_noise, seed + 1, k_positions),
        )


def _changed(
    x: Tensor, rows: Factors, std: tuple[float, ...], seed: int, positions: Tensor
) -> Tensor:
    if rows:
        x = x * _factors(rows, x.device).to(x.dtype)
    return x + noise(std, x.shape[-1], seed, positions).to(x.dtype) if std else x


def noise(std: tuple[float, ...], size: int, seed: int, positions: Tensor) -> Tensor:
    """Noise of every head at ``positions`` ``[..., T]``: ``[..., H, T, size]`` float32."""
    table = _table(len(std), size, seed, positions.device)[:, positions % PERIOD]
    if positions.dim() == 2:
        table = table.transpose(0, 1)
    return table * _factors(tuple((s,) for s in std), positions.device)


@torch.compiler.disable  # the graph breaks here rather than build the tensor at every call
@lru_cache
def _factors(rows: Factors, device: torch.device) -> Tensor:
    """``[H, 1, D]`` float32."""
    return torch.tensor(rows, dtype=torch.float32, device=device)[:, None]


@torch.compiler.disable
@lru_cache(maxsize=64)
def _table(heads: int, size: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, PERIOD, size, generator=generator).to(device)
