"""Rotation of queries and keys by a spectrum, and the temperature on the queries.

The channel layout is Hugging Face's rotate-half: pair m of M is channels (m, m + M).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainer.positional.layout import Layout
from trainer.positional.spectrum import Frequencies, Spectrum


@dataclass(frozen=True)
class HeadGroup:
    """Tables of neighbouring key-value heads with the same spectrum, for one forward pass.

    ``cos``, ``sin``: ``[T, pairs]`` or ``[B, 1, T, pairs]``; None without rotation.
    ``temperature``: factor on the queries, a number or ``[T, 1]``/``[B, 1, T, 1]``; None for 1.
    """

    kv_heads: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    temperature: float | Tensor | None = None


Groups = tuple[HeadGroup, ...]
"""Tables of all key-value heads of a layer."""


def rotary_table(spectrum: Spectrum, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of ``positions * inv_freq``, times the spectrum's ``rotary_scale``.

    The phase is reduced to one turn in float64 and only then rounded: in float32 the product itself
    is off by 0.06 rad at position 10^6. For ``[..., T]`` positions, in tokens, both tables are
    ``[..., T, pairs]`` float32.
    """
    inv_freq = frequencies(spectrum.inv_freq, positions.device)
    phase = positions.to(torch.float64)[..., None] * inv_freq
    phase = torch.remainder(phase, 2 * math.pi).to(torch.float32)
    cos, sin = phase.cos(), phase.sin()
    if spectrum.rotary_scale != 1:
        cos, sin = cos * spectrum.rotary_scale, sin * spectrum.rotary_scale
    return cos, sin


@lru_cache
def frequencies(inv_freq: Frequencies, device: torch.device) -> Tensor:
    """Return frequencies on a device; cached.

    During an annealed drop they differ at every step. A copy from pinned memory does not block the
    host until the GPU has them.
    """
    tensor = torch.tensor(inv_freq, dtype=torch.float64, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class _Rotate(torch.autograd.Function):
    """Rotation whose gradient is the inverse rotation, so that it keeps no activations.

    A ``rotary_scale`` in the tables scales both directions alike, as the transpose requires.
    """

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = cos.shape[-1]
        out = torch.empty_like(x)
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        torch.mul(first, cos, out=out[..., :pairs]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., pairs : 2 * pairs]).addcmul_(first, sin)
        out[..., 2 * pairs :] = x[..., 2 * pairs :]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * pairs`` channels of ``x`` ``[B, H, T, D]``; the rest passes through.

    The tables are rounded to the dtype of ``x`` first, as in Hugging Face models.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not torch.compiler.is_compiling():
        # Without gradients, skip autograd: its bookkeeping costs a decoding step more than the
        # rotation.
        turn = _Rotate.apply if torch.is_grad_enabled() else _Rotate.forward
        return turn(x, cos, sin)
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]]
    return torch.cat(parts, dim=-1)


def head_groups(
    layout: Layout,
    positions: Tensor,
    lengths: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[Groups]:
    """Return the tables of every layer for one forward pass, computed once per distinct spectrum.

    ``positions``: ``[T]`` or ``[B, T]``, of the tokens to encode. ``lengths``: tokens in the whole
    sequence, one number for all rows or one per row. ``dtype``: of the cosines and sines; with the
    queries' dtype, :func:`rotate` rounds nothing.
    """
    if isinstance(lengths, int):
        return _groups_at(layout, positions, lengths, dtype)
    if not layout.follows_length:
        return _groups_at(layout, positions, max(lengths), dtype)
    rows = [_groups_at(layout, p, n, dtype) for p, n in zip(positions, lengths, strict=True)]
    by_layer: dict[int, Groups] = {}
    for layer, of_rows in zip(layout.layers, zip(*rows, strict=True), strict=True):
        if id(layer) not in by_layer:
            by_layer[id(layer)] = tuple(
                _stacked(groups, positions.device) for groups in zip(*of_rows, strict=True)
            )
    return [by_layer[id(layer)] for layer in layout.layers]


def _groups_at(layout: Layout, positions: Tensor, length: int, dtype: torch.dtype) -> list[Groups]:
    """Return the tables for sequences of one length, grouped like the heads of the layout."""
    tables: dict[tuple[Frequencies, float], tuple[Tensor, Tensor]] = {}

    def group(spectrum: Spectrum, kv_heads: int, window: int | None) -> HeadGroup:
        spectrum = spectrum.at(length, layout.training_length)
        temperature = _temperature(spectrum, positions, window, layout.training_length)
        if not spectrum.rotates and spectrum.rotary_scale == 1:
            return HeadGroup(kv_heads, temperature=temperature)
        key = spectrum.inv_freq, spectrum.rotary_scale
        if key not in tables:
            cos, sin = (table.to(dtype) for table in rotary_table(spectrum, positions))
            if positions.dim() == 2:
                cos, sin = cos[:, None], sin[:, None]
            tables[key] = cos, sin
        return HeadGroup(kv_heads, *tables[key], temperature)

    by_layer: dict[int, Groups] = {}
    for layer in layout.layers:
        if id(layer) not in by_layer:
            by_layer[id(layer)] = tuple(
                group(spectrum, heads, layer.window) for spectrum, heads in layer.groups
            )
    return [by_layer[id(layer)] for layer in layout.layers]


def _temperature(
    spectrum: Spectrum, positions: Tensor, window: int | None, training_length: int
) -> float | Tensor | None:
    temperature = spectrum.temperature
    if temperature.is_constant:
        return None if temperature.scale == 1.0 else temperature.scale
    reference, seen = temperature.reference or training_length, positions + 1
    if window is not None:
        seen = seen.clamp(max=window)
    stretch = 1 + seen // reference if temperature.steps else seen.clamp(min=reference) / reference
    tempered = 1 + temperature.coefficient * stretch.log()
    factor = (temperature.scale * tempered**temperature.exponent)[..., None]
    return factor[:, None] if positions.dim() == 2 else factor


def _stacked(rows: Sequence[HeadGroup], device: torch.device) -> HeadGroup:
    """Join the tables of a batch's rows into one group."""
    first = rows[0]
    cos = sin = temperature = None
    if first.cos is not None and first.sin is not None:
        cos, sin = (torch.stack([getattr(row, name) for row in rows]) for name in ("cos", "sin"))
        cos, sin = cos[:, None], sin[:, None]
    if any(row.temperature is not None for row in rows):
        # Per row, a number for all queries, or [T, 1].
        factors = [1.0 if row.temperature is None else row.temperature for row in rows]
        of_rows = [torch.as_tensor(factor, device=device).view(1, -1, 1) for factor in factors]
        temperature = torch.stack(of_rows)
    return HeadGroup(first.kv_heads, cos, sin, temperature)


def encode_queries(q: Tensor, groups: Groups) -> Tensor:
    """Rotate and temper queries ``[B, Hq, T, D]``; return them unchanged if their encoding is
    empty."""
    if all(group.cos is None and group.temperature is None for group in groups):
        return q
    return _by_group(q, groups, _encode_queries)


def encode_keys(k: Tensor, groups: Groups) -> Tensor:
    """Rotate keys ``[B, Hkv, T, D]``; return them unchanged if their encoding is empty."""
    return k if all(group.cos is None for group in groups) else _by_group(k, groups, _rotated)


def _by_group(x: Tensor, groups: Groups, change: Callable[[Tensor, HeadGroup], Tensor]) -> Tensor:
    """Apply ``change`` to the heads of ``x`` ``[B, H, T, D]``, group by group."""
    if len(groups) == 1:
        return change(x, groups[0])
    heads_per_key = x.shape[1] // sum(group.kv_heads for group in groups)
    parts = x.split([group.kv_heads * heads_per_key for group in groups], dim=1)
    return torch.cat([change(part, g) for part, g in zip(parts, groups, strict=True)], dim=1)


def _encode_queries(q: Tensor, group: HeadGroup) -> Tensor:
    q, factor = _rotated(q, group), group.temperature
    if factor is None:
        return q
    return q * (factor.to(q.dtype) if isinstance(factor, Tensor) else factor)


def _rotated(x: Tensor, group: HeadGroup) -> Tensor:
    return x if group.cos is None or group.sin is None else rotate(x, group.cos, group.sin)
