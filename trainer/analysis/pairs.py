"""The channel pairs of a head that a rotary encoding turns: pair m of M is channels m and m + M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.positional.layout import LayerEncoding

Side = Literal["query", "key"]


def pair_counts(encoding: LayerEncoding, heads: int, head_dim: int) -> tuple[int, ...]:
    """Pairs of each of ``heads`` query or key heads of a layer.

    A head without rotation is read as pairs (m, m + head_dim / 2), as if all of it rotated.
    """
    per_key = heads // len(encoding.spectra)
    return tuple(
        len(spectrum.inv_freq) or head_dim // 2
        for spectrum in encoding.spectra
        for _ in range(per_key)
    )


def pair_norms(x: Tensor, pairs: int) -> Tensor:
    """l2 norms of the first ``pairs`` pairs of ``x`` ``[..., T, D]`` along it: ``[..., pairs, T]``.

    A rotation leaves them as they are.
    """
    return torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs]).transpose(-2, -1)


def of_pairs(rows: Sequence[Tensor]) -> Tensor:
    """One number a pair for every head, ``[H, pairs]``; NaN where a head has fewer pairs."""
    return pad_sequence(list(rows), batch_first=True, padding_value=math.nan)
