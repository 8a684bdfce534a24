"""Interventions: changes of encoded queries and keys in an evaluation."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from trainer.positional.layout import Factors, Intervention

BITS = 32


def intervene(
    intervention: Intervention, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Change queries and keys, ``[B, H, T, D]`` each, at positions ``[T]`` or ``[B, T]``."""
    seed = 2 * intervention.seed
    return (
        _changed(q, intervention.query, intervention.query_noise, seed, q_positions),
        _changed(k, intervention.key, intervention.key_noise, seed + 1, k_positions),
    )


def _changed(
    x: Tensor, rows: Factors, std: tuple[float, ...], seed: int, positions: Tensor
) -> Tensor:
    """Multiply channels by factors, then add noise."""
    if rows:
        x = x * _factors(rows, x.device).to(x.dtype)
    if any(std):
        x = x + noise(std, x.shape[-1], seed, positions).to(x.dtype)
    return x


def noise(std: tuple[float, ...], size: int, seed: int, positions: Tensor) -> Tensor:
    """Return Gaussian noise for every head at ``positions`` ``[..., T]``: ``[..., H, T, size]``
    float32.

    It is a hash of seed, head, channel and position, so that it does not repeat below 2^32 and
    needs no table. Box and Muller's transform makes it Gaussian.
    """
    chosen = [head for head, deviation in enumerate(std) if deviation]
    first, second = _keys(len(std), size, seed, positions.device)[:, chosen]
    place = _mixed(positions[..., None, :, None] & (2**BITS - 1))
    bits = _mixed(place ^ first)
    radius = (-2 * ((bits + 0.5) / 2**BITS).log()).sqrt()
    draws = radius * (_mixed(bits ^ second) * (2 * math.pi / 2**BITS)).cos()
    noise_of_heads = draws.new_zeros(*draws.shape[:-3], len(std), *draws.shape[-2:])
    noise_of_heads[..., chosen, :, :] = draws * _factors(
        tuple((std[h],) for h in chosen), draws.device
    )
    return noise_of_heads


def _mixed(x: Tensor) -> Tensor:
    """Scatter 32 bits by a bijection (Wellons's "lowbias32"), in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & (2**BITS - 1)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & (2**BITS - 1)
    return x ^ (x >> 16)


@lru_cache
def _factors(rows: Factors, device: torch.device) -> Tensor:
    """Return factors ``[H, 1, D]``, float32."""
    return torch.tensor(rows, dtype=torch.float32, device=device)[:, None]


@lru_cache(maxsize=64)
def _keys(heads: int, size: int, seed: int, device: torch.device) -> Tensor:
    """Return random 32-bit integers ``[2, heads, 1, size]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**BITS, (2, heads, 1, size), generator=generator).to(device)
