"""Determine how an attention layer of transformers rotates, from its behaviour.

Layers get tables of cosines and sines. They differ in the tables' form and in the channels of a
pair: halves of a head (Llama), of its first channels only (Phi), neighbours (Llama 4), or
neighbours among the last channels (DeepSeek-V2). Each layer is run once with its tables and once
with tables of no rotation. Its arrangement is the one that transforms the second result into the
first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.positional.rotation import rotary_table, rotate
from trainer.positional.spectrum import Spectrum

Tables = Tensor | tuple[Tensor, Tensor]
"""What a layer is given as ``position_embeddings``: complex numbers, or cosines and sines."""

CLOSE = 1e-4
"""Of the largest entry: how far a rotation in float32 may be from the model's own."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of one layer.

    ``spectrum``: of every head. ``order``: the layer's channels in spectrum order: pair m at m and
    m + pairs, then the channels that do not rotate (None: unchanged). ``form``: form of its tables,
    see :func:`complex_table` (None: it has none).
    """

    spectrum: Spectrum
    order: tuple[int, ...] | None = None
    form: str | None = None

    def ordered(self, x: Tensor) -> Tensor:
        """Reorder the channels of ``[..., D]``."""
        return x if self.order is None else x[..., list(self.order)]


def no_rotation(tables: Tables) -> Tables:
    """Return tables of the same form that leave queries and keys unchanged."""
    if isinstance(tables, Tensor):
        return torch.ones_like(tables)
    return torch.ones_like(tables[0]), torch.zeros_like(tables[1])


def complex_table(tables: Tables) -> tuple[str, Tensor]:
    """Return the form of tables, and their values ``[B, T, pairs]`` as complex128.

    ``complex``: one number per pair; ``halves``, ``neighbours``: every cosine twice, in both halves
    or side by side; ``single``: once.
    """
    if isinstance(tables, Tensor):
        return "complex", tables.to(torch.complex128)
    cos, sin = (table.double() for table in tables)
    pairs = cos.shape[-1] // 2
    both = torch.complex(cos, sin)
    if torch.equal(both[..., :pairs], both[..., pairs:]):
        return "halves", both[..., :pairs]
    if torch.equal(both[..., ::2], both[..., 1::2]):
        return "neighbours", both[..., ::2]
    return "single", both


def tables_like(original: Tables, form: str | None, cos: Tensor, sin: Tensor) -> Tables:
    """Convert ``[T, pairs]`` or ``[B, 1, T, pairs]`` to a form, with the dtypes of ``original``."""
    if isinstance(original, Tensor):
        return torch.complex(*_rows(cos, sin)).to(original.dtype).expand_as(original)
    if form == "halves":
        cos, sin = (x.repeat(*[1] * (x.dim() - 1), 2) for x in (cos, sin))
    elif form == "neighbours":
        cos, sin = (x.repeat_interleave(2, dim=-1) for x in (cos, sin))
    cos, sin = _rows(cos, sin)
    first, second = original
    return cos.to(first.dtype).expand_as(first), sin.to(second.dtype).expand_as(second)


def _rows(*tables: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of tables, ``[B or 1, T, n]``."""
    return tuple(x.squeeze(1) if x.dim() == 4 else x[None] for x in tables)


def found_rotation(
    tables: Tables | None, plain: tuple[Tensor, Tensor] | None, encoded: tuple[Tensor, Tensor]
) -> Rotation | None:
    """Determine the rotation from ``plain`` to ``encoded`` queries and keys, ``[B, H, T, D]``
    float32.

    Args:
        tables: tables for positions 0, 1, ..., T - 1, with T at least 2.
        plain: result with the tables of no rotation (None: unknown).
        encoded: result with ``tables``.

    Returns:
        None if no known arrangement fits.
    """
    if plain is None:
        return None
    form, table = (None, None) if tables is None else complex_table(tables)
    if all(torch.equal(x, y) for x, y in zip(plain, encoded, strict=True)):
        return Rotation(Spectrum(), None, form)
    if table is None:
        return None
    once = table[0, 1]
    scale = once.abs().mean().item()
    spectrum = Spectrum(
        tuple(once.angle().tolist()), rotary_scale=1.0 if abs(scale - 1) < 1e-6 else scale
    )
    size = encoded[0].shape[-1]
    for order in _orders(size, spectrum.rotary_dim):
        rotation = Rotation(spectrum, order, form)
        if all(_leads(rotation, x, y) for x, y in zip(plain, encoded, strict=True)):
            return rotation
    return None


def _leads(rotation: Rotation, plain: Tensor, encoded: Tensor) -> bool:
    positions = torch.arange(plain.shape[2], device=plain.device)
    turned = rotate(rotation.ordered(plain), *rotary_table(rotation.spectrum, positions))
    far = (turned - rotation.ordered(encoded)).abs().amax()
    return bool(far <= CLOSE * encoded.abs().amax())


def _orders(size: int, rotated: int) -> list[tuple[int, ...] | None]:
    """List arrangements of the ``rotated`` channels of a head: halves and neighbours, first or
    last."""
    if rotated > size:
        return []
    orders: list[tuple[int, ...] | None] = []
    for start in dict.fromkeys((0, size - rotated)):
        rotating = range(start, start + rotated)
        still = [*range(start), *range(start + rotated, size)]
        orders.append(None if start == 0 else (*rotating, *still))
        orders.append(tuple(chain(rotating[::2], rotating[1::2], still)))
    return orders


def in_one_order(rotations: list[Rotation]) -> list[Rotation]:
    """Give layers without rotation the channel order of the rotating ones."""
    order = next((r.order for r in rotations if r.spectrum.rotates), None)
    return [r if r.spectrum.rotates else replace(r, order=order) for r in rotations]


def grows_with_length(model: PreTrainedModel) -> bool:
    """Whether the model's own frequencies depend on the length of the text (longrope, dynamic NTK).

    transformers takes one length for a batch, that of its longest text.
    """
    kinds: list[str] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds += kind.values() if isinstance(kind, dict) else [kind] if kind else []
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def forget_lengths(model: PreTrainedModel) -> None:
    """Reset frequencies that grew with an earlier text.

    transformers keeps them for a shorter text that is as long as the training length.
    """
    for module in model.modules():
        if not hasattr(module, "original_max_seq_len"):
            continue
        for name, _ in [*module.named_buffers(recurse=False)]:
            prefix = name.removesuffix("inv_freq")
            first = getattr(module, f"{prefix}original_inv_freq", None)
            if name.endswith("inv_freq") and first is not None:
                getattr(module, name).copy_(first)
        for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)
