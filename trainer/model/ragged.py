"""What rows of different lengths need from their positional encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rotation import HeadGroup, head_groups


def ragged_head_groups(
    layout: Layout, positions: Tensor, lengths: Sequence[int]
) -> list[tuple[HeadGroup, ...]]:
    """What :func:`head_groups` says of every row alone, for all rows together.

    Args:
        layout: the encodings of all layers.
        positions: ``[B, T]``.
        lengths: tokens in the whole sequence of every row.
    """
    if not _changes_with_length(layout):
        return head_groups(layout, positions, max(lengths))
    rows = [head_groups(layout, p, n) for p, n in zip(positions, lengths, strict=True)]
    layers: dict[LayerEncoding, tuple[HeadGroup, ...]] = {}
    for layer, alone in zip(layout.layers, zip(*rows, strict=True), strict=True):
        if layer not in layers:
            layers[layer] = tuple(
                _together(groups, positions.device) for groups in zip(*alone, strict=True)
            )
    return [layers[layer] for layer in layout.layers]


@lru_cache
def _changes_with_length(layout: Layout) -> bool:
    return any(
        spectrum.beyond is not None
        or (spectrum.temperature.per == "sequence" and not spectrum.temperature.is_constant)
        for spectrum in layout.spectra
    )


def _together(groups: Sequence[HeadGroup], device: torch.device) -> HeadGroup:
    """One group for the batch from those of its rows."""
    stacked = {
        name: torch.stack([getattr(group, name) for group in groups])
        for name in ("cos", "sin", "q_noise", "k_noise")
        if getattr(groups[0], name) is not None
    }
    for name in stacked.keys() & {"cos", "sin"}:
        stacked[name] = stacked[name][:, None]
    factor = None
    if any(group.temperature is not None for group in groups):
        factors = [1.0 if g.temperature is None else g.temperature for g in groups]
        # A number for all of a row's queries, or [T, 1].
        rows = [torch.as_tensor(value, device=device).view(1, -1, 1) for value in factors]
        factor = torch.stack(rows)
    return replace(groups[0], temperature=factor, **stacked)
