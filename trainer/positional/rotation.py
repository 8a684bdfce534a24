"""Rotation of queries and keys by a spectrum, and the temperature on the queries.

The channel layout is Hugging Face's rotate-half: pair m of M is channels (m, m + M).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainer.positional.gain_tensors import factors, noise
from trainer.positional.gains import Gains
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rescaling import at_length
from trainer.positional.spectrum import Spectrum


@dataclass(eq=False)
class Late:
    """What it takes to encode earlier keys of a layer again, when its frequencies have changed.

    ``length``: tokens in the whole sequence, in the first row where rows differ. ``groups``: those
    of all keys, once one of the layers that share this object has computed them.
    """

    layer: LayerEncoding
    length: int
    groups: tuple[HeadGroup, ...] = ()


@dataclass(frozen=True)
class HeadGroup:
    """What a forward pass needs for neighbouring key-value heads of one spectrum.

    ``cos``, ``sin``: ``[T, pairs]`` or ``[B, 1, T, pairs]``, float32; None where nothing rotates.
    ``temperature``: factor on the queries, a number or ``[T, 1]``/``[B, 1, T, 1]``; None for 1.
    ``q_gain``, ``k_gain``: ``[H, 1, D]``, factors on the rotated queries and keys, and ``q_noise``,
    ``k_noise``: ``[H, T, D]`` or ``[B, H, T, D]``, added to them (see :class:`Gains`).
    ``late``: set where the frequencies of the layer change with the length.
    """

    kv_heads: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    temperature: float | Tensor | None = None
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    q_noise: Tensor | None = None
    k_noise: Tensor | None = None
    late: Late | None = None

    @property
    def is_identity(self) -> bool:
        """Whether queries and keys pass unchanged."""
        return all(getattr(self, field.name) is None for field in fields(self)[1:])


def rotary_table(spectrum: Spectrum, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions * inv_freq``, times the spectrum's ``rotary_scale``.

    The phase is reduced to one turn in float64 and only then rounded: in float32 the product
    itself is off by 0.06 rad at position 10^6.

    Args:
        spectrum: the encoding.
        positions: ``[..., T]`` integers, in tokens.

    Returns:
        Two float32 tensors ``[..., T, pairs]``.
    """
    inv_freq = _frequencies(spectrum.inv_freq, positions.device)
    phase = positions.to(torch.float64)[..., None] * inv_freq
    phase = torch.remainder(phase, 2 * math.pi).to(torch.float32)
    cos, sin = phase.cos(), phase.sin()
    if spectrum.rotary_scale != 1:
        cos, sin = cos * spectrum.rotary_scale, sin * spectrum.rotary_scale
    return cos, sin


@lru_cache
def _frequencies(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, since copying to a GPU waits for it."""
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)


class _Rotate(torch.autograd.Function):
    """A rotation whose gradient is the rotation back, so that it keeps no activations.

    With a ``rotary_scale`` in the tables both are scaled alike, as the transpose is.
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

    The tables are rounded to the type of ``x`` first, as Hugging Face models do.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not torch.compiler.is_compiling():
        # Without gradients the bookkeeping of autograd would cost a decoding step more than this.
        turn = _Rotate.apply if torch.is_grad_enabled() else _Rotate.forward
        return turn(x, cos, sin)
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]]
    return torch.cat(parts, dim=-1)


def _temperature(spectrum: Spectrum, positions: Tensor, length: int) -> float | Tensor | None:
    temperature = spectrum.temperature
    if temperature.per == "query" and not temperature.is_constant:
        stretch = (positions + 1).clamp(min=spectrum.training_length) / spectrum.training_length
        factor = temperature.scale * (1 + temperature.coefficient * stretch.log()) ** (
            temperature.exponent
        )
        return factor[..., None]
    value = temperature.at(length, spectrum.training_length)
    return None if value == 1.0 else value


def head_groups(layout: Layout, positions: Tensor, length: int) -> list[tuple[HeadGroup, ...]]:
    """What every layer needs in this forward pass; tables are computed once a distinct spectrum.

    Args:
        layout: the encodings of all layers.
        positions: ``[T]`` or ``[B, T]``, the positions of the queries (and of the new keys).
        length: tokens in the whole sequence, for temperatures per sequence and for frequencies
            that change with the length.
    """
    tables: dict[tuple[tuple[float, ...], float], tuple[Tensor, Tensor]] = {}

    def group(spectrum: Spectrum, kv_heads: int) -> HeadGroup:
        spectrum = at_length(spectrum, length)
        temperature = _temperature(spectrum, positions, length)
        if isinstance(temperature, Tensor) and positions.dim() == 2:
            temperature = temperature[:, None]
        if not spectrum.rotates and spectrum.rotary_scale == 1:
            return HeadGroup(kv_heads, temperature=temperature)
        key = spectrum.inv_freq, spectrum.rotary_scale
        if key not in tables:
            cos, sin = rotary_table(spectrum, positions)
            if positions.dim() == 2:
                cos, sin = cos[:, None], sin[:, None]
            tables[key] = cos, sin
        return HeadGroup(kv_heads, *tables[key], temperature)

    layers: dict[LayerEncoding, tuple[HeadGroup, ...]] = {}
    for layer in layout.layers:
        if layer not in layers:
            groups = tuple(group(spectrum, n) for spectrum, n in layer.groups)
            if layer.gains is not None:
                groups = _gained(groups, layer, positions)
            if any(spectrum.beyond is not None for spectrum, _ in layer.groups):
                late = Late(layer, length)
                groups = tuple(replace(group, late=late) for group in groups)
            layers[layer] = groups
    return [layers[layer] for layer in layout.layers]


def _gained(
    groups: tuple[HeadGroup, ...], layer: LayerEncoding, positions: Tensor
) -> tuple[HeadGroup, ...]:
    """The groups with each its part of the layer's gains."""
    assert layer.gains is not None
    whole = _gain_tensors(layer.gains, positions)
    found, first, heads = [], 0, len(layer.spectra)
    for group in groups:
        part = {}
        for name, tensor in whole.items():
            per_key = tensor.shape[-3] // heads  # query heads a key-value head, or 1
            begin, count = first * per_key, group.kv_heads * per_key
            part[name] = tensor.narrow(-3, begin, count)
        found.append(replace(group, **part))
        first += group.kv_heads
    return tuple(found)


def _gain_tensors(gains: Gains, positions: Tensor) -> dict[str, Tensor]:
    found = {}
    for side, rows, std in (
        ("q", gains.query, gains.query_noise),
        ("k", gains.key, gains.key_noise),
    ):
        if rows:
            found[f"{side}_gain"] = factors(rows, positions.device)
        if std:
            seed = 2 * gains.seed + (side == "k")
            found[f"{side}_noise"] = noise(std, len(rows[0]), seed, positions)
    return found


def encode(q: Tensor, k: Tensor, groups: tuple[HeadGroup, ...]) -> tuple[Tensor, Tensor]:
    """Rotate and temper queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, T, D]``, then their gains.

    The one seam between projections and scores. Returns the inputs themselves where there is
    nothing to do.
    """
    if all(group.is_identity for group in groups):
        return q, k
    return _by_group(q, groups, _encode_queries), encode_keys(k, groups)


def encode_keys(k: Tensor, groups: tuple[HeadGroup, ...]) -> Tensor:
    """The keys of :func:`encode` alone."""
    return _by_group(k, groups, _encode_keys)


def _by_group(
    x: Tensor, groups: tuple[HeadGroup, ...], change: Callable[[Tensor, HeadGroup], Tensor]
) -> Tensor:
    """``change`` made to the heads ``[B, H, T, D]`` of every group."""
    if len(groups) == 1:
        return change(x, groups[0])
    heads_per_key = x.shape[1] // sum(group.kv_heads for group in groups)
    parts = x.split([group.kv_heads * heads_per_key for group in groups], dim=1)
    return torch.cat([change(part, g) for part, g in zip(parts, groups, strict=True)], dim=1)


def _encode_queries(q: Tensor, group: HeadGroup) -> Tensor:
    q = _turned(q, group)
    if group.temperature is not None:
        factor = group.temperature
        q = q * (factor.to(q.dtype) if isinstance(factor, Tensor) else factor)
    return _with_gain(q, group.q_gain, group.q_noise)


def _encode_keys(k: Tensor, group: HeadGroup) -> Tensor:
    return _with_gain(_turned(k, group), group.k_gain, group.k_noise)


def _turned(x: Tensor, group: HeadGroup) -> Tensor:
    return x if group.cos is None or group.sin is None else rotate(x, group.cos, group.sin)


def _with_gain(x: Tensor, gain: Tensor | None, added: Tensor | None) -> Tensor:
    if gain is not None:
        x = x * gain.to(x.dtype)
    return x if added is None else x + added.to(x.dtype)
