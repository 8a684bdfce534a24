"""Tensors of spectra: rotation of queries and keys, temperature of queries, ALiBi's slopes.

The channel layout is Hugging Face's rotate-half: pair m of M is channels (m, m + M).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import Layout
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class HeadGroup:
    """Tables of neighbouring key-value heads with the same spectrum, for one forward pass.

    ``cos``, ``sin``: ``[T, 2 pairs]`` or ``[B, 1, T, 2 pairs]``; None without rotation.
    ``temperature``: factor on the queries, a number or ``[T, 1]``, ``[B, 1, T, 1]`` or ``[B, 1, 1,
    1]``; None for 1.
    """

    kv_heads: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    temperature: float | Tensor | None = None


Groups = tuple[HeadGroup, ...]
"""Tables of all key-value heads of a layer."""


def rotary_table(spectrum: Spectrum, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of ``positions * inv_freq``, times the spectrum's ``rotary_scale``.

    For ``[..., T]`` positions, in tokens, both tables are ``[..., T, 2 pairs]`` float32, one half
    for each channel of the pairs: ``(cos, cos)`` and ``(-sin, sin)``.
    """
    inv_freq = frequencies(spectrum.inv_freq, positions.device)
    return _table(inv_freq, spectrum.rotary_scale, positions)


def _table(inv_freq: Tensor, scale: float | Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a table for frequencies ``[pairs]``, or ``[B, 1, pairs]`` with a scale ``[B, 1, 1]``.

    The phase is reduced to one turn in float64 and only then rounded: in float32 the product itself
    is off by 0.06 rad at position 10^6.
    """
    phase = positions.to(torch.float64)[..., None] * inv_freq
    phase = torch.remainder(phase, 2 * math.pi).to(torch.float32)
    cos, sin = phase.cos(), phase.sin()
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos * scale, sin * scale


@lru_cache
def frequencies(inv_freq: Any, device: torch.device) -> Tensor:
    """Return frequencies (nested tuples) as float64 on a device; cached to avoid a host sync."""
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of ``x`` ``[B, H, T, D]``, as many as the tables of
    :func:`rotary_table` have; the rest passes through.

    The tables are rounded to the dtype of ``x`` first, as in Hugging Face models. Autograd keeps
    only them.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    size = cos.shape[-1]
    part = x[..., :size]
    turned = torch.addcmul(part * cos, part.roll(size // 2, -1), sin)
    if size == x.shape[-1]:
        return turned
    return torch.cat([turned, x[..., size:]], dim=-1)


def head_groups(
    layout: Layout,
    positions: Tensor,
    lengths: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[Groups]:
    """Return the tables of every layer for one forward pass, computed once per distinct spectrum.

    ``positions``: ``[T]`` or ``[B, T]``, of the tokens to encode. ``lengths``: tokens of the
    sequence, of all rows or of every row. ``dtype``: of the cosines and sines; with the queries'
    dtype, :func:`rotate` rounds nothing.
    """
    tables: dict[Any, tuple[Tensor, Tensor]] = {}
    C = layout.training_length
    device = positions.device
    of_rows = [lengths] if isinstance(lengths, int) else lengths

    def group(spectrum: Spectrum, kv_heads: int, window: int | None) -> HeadGroup:
        rows = [spectrum.at(n, C) for n in of_rows] if spectrum.follows_length else [spectrum]
        temperature = _temperature(rows, positions, window, C)
        key = tuple((row.inv_freq, row.rotary_scale) for row in rows)
        if not any(any(inv_freq) or scale != 1 for inv_freq, scale in key):
            return HeadGroup(kv_heads, temperature=temperature)
        if key not in tables:
            inv_freq, scale = zip(*key, strict=True)
            if len(set(key)) == 1:
                cos, sin = _table(frequencies(inv_freq[0], device), scale[0], positions)
            else:
                scales = frequencies(scale, device).float()[:, None, None]
                cos, sin = _table(frequencies(inv_freq, device)[:, None], scales, positions)
            if cos.dim() == 3:  # rows of their own, for all heads
                cos, sin = cos[:, None], sin[:, None]
            tables[key] = cos.to(dtype), sin.to(dtype)
        return HeadGroup(kv_heads, *tables[key], temperature)

    of_layers: list[Groups] = [()] * len(layout.layers)
    for layer, indices in layout.distinct.items():
        groups = tuple(group(spectrum, heads, layer.window) for spectrum, heads in layer.groups)
        for index in indices:
            of_layers[index] = groups
    return of_layers


def _temperature(
    rows: Sequence[Spectrum], positions: Tensor, window: int | None, training_length: int
) -> float | Tensor | None:
    """Return the factor on the queries, see :class:`HeadGroup`; ``rows``: the spectrum at the
    length of every row, or of all."""
    temperature = rows[0].temperature
    if temperature.is_constant:
        scales = [row.temperature.scale for row in rows]
        if len(set(scales)) > 1:
            return torch.tensor(scales, device=positions.device)[:, None, None, None]
        return None if scales[0] == 1 else scales[0]
    seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
    reference = temperature.reference or training_length
    stretch = 1 + seen // reference if temperature.steps else seen.clamp(min=reference) / reference
    tempered = 1 + temperature.coefficient * stretch.log()
    factor = (temperature.scale * tempered**temperature.exponent)[..., None]
    return factor[:, None] if factor.dim() == 3 else factor


def encode(x: Tensor, groups: Groups, *, tempered: bool = False) -> Tensor:
    """Rotate queries or keys ``[B, H, T, D]``; ``tempered``: also apply the temperature."""

    def encoded(part: Tensor, group: HeadGroup) -> Tensor:
        if group.cos is not None and group.sin is not None:
            part = rotate(part, group.cos, group.sin)
        factor = group.temperature
        if factor is None or not tempered:
            return part
        if isinstance(factor, Tensor):
            factor = factor.to(part.dtype)
        return part * factor

    if len(groups) == 1:
        return encoded(x, groups[0])
    heads_per_key = x.shape[1] // sum(group.kv_heads for group in groups)
    parts = x.split([group.kv_heads * heads_per_key for group in groups], dim=1)
    return torch.cat([encoded(part, g) for part, g in zip(parts, groups, strict=True)], dim=1)


@lru_cache
def bias_slopes(heads: int, biased: tuple[bool, ...], device: torch.device) -> Tensor | None:
    """Return ALiBi's slope of each query head ``[heads]``, 0 without bias; None if all are.

    ``biased``: whether each key-value head, or each query head, has a bias. Cached to avoid a host
    sync.
    """
    if not any(biased):
        return None
    slopes = torch.tensor(alibi_slopes(heads), device=device)
    return slopes * torch.tensor(biased, device=device).repeat_interleave(heads // len(biased))
