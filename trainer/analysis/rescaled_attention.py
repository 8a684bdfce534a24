"""The effect of rescaled frequencies on a head's attention (DroPE Sec. 4.1, Fig. 6, 7, 8, 11)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention_rows import head_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.positional.rescaling import (
    Rescaling,
    ntk_aware,
    ntk_by_parts_turns,
    position_interpolation,
)
from trainer.positional.spectrum import Spectrum

BLOCK = 256
METHODS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": ntk_by_parts_turns,
}
"""What Fig. 6 and 11 compare: Eq. 9 to 11, of which the last has a ramp over the frequency."""


def scaling_factors(spectrum: Spectrum, training_length: int, factor: float) -> dict[str, Array]:
    """gamma ``[pairs]`` of Eq. 3 for each of :data:`METHODS`: a factor for every frequency.

    A pair that stands still stays as it is: 1. Frequencies are those of sequences of C tokens.
    """
    inv_freq = spectrum.at(training_length, training_length).inv_freq
    before = np.array(inv_freq)
    still = before == 0
    return {
        name: np.where(
            still,
            1.0,
            np.array(rescaling(inv_freq, training_length).frequencies(inv_freq, factor))
            / np.where(still, 1.0, before),
        )
        for name, rescaling in METHODS.items()
    }


@torch.no_grad()
def attention_by_distance(heads: Heads, head: int, distances: int) -> Array:
    """Mean attention ``[distances]`` on the key 0, 1, 2, ... tokens back (Fig. 7).

    The mean is over the queries that have such a key.
    """
    T = heads.q.shape[2]
    distances = min(distances, T)
    total = torch.zeros(distances, dtype=torch.float64)
    back = torch.arange(distances, device=heads.q.device)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        attention = head_attention(heads, head, slice(start, stop))
        j = torch.arange(start, stop, device=back.device)[:, None] - back
        picked = attention.gather(-1, j.clamp(min=0).expand(len(attention), -1, -1))
        total += (picked * (j >= 0)).double().sum(dim=(0, 1)).cpu()
    return (total / (heads.q.shape[0] * torch.arange(T, T - distances, -1))).numpy()


@torch.no_grad()
def attention_around(heads: Heads, head: int, half: int, reach: int) -> Array:
    """Mean attention ``[2 reach + 1]`` of repeated tokens on keys around their first occurrence.

    Args:
        heads: of texts whose last ``half`` tokens are the ``half`` tokens before, once more.
        head: the query head.
        half: tokens that are repeated, more than ``reach``.
        reach: how far before and behind; entry ``reach`` is the occurrence itself, the next one the
            token that followed it.
    """
    T = heads.q.shape[2]
    attention = head_attention(heads, head, slice(T - half, T))
    first = T - 2 * half
    diagonals = [
        attention.diagonal(first + offset, -2, -1).double().mean()
        for offset in range(-reach, reach + 1)
    ]
    return torch.stack(diagonals).cpu().numpy()


@torch.no_grad()
def attention_shift(heads: Heads, others: Heads, queries: slice) -> Array:
    """How much of a head's attention ``[Hq]`` lies on other keys in another reading of the texts:
    total variation distance, 0 to 1, mean over some of the queries."""

    def of_head(head: int) -> Tensor:
        one, other = (head_attention(x, head, queries) for x in (heads, others))
        return (one - other).abs().sum(dim=-1).mean() / 2

    shifts = [of_head(head) for head in range(heads.q.shape[1])]
    return torch.stack(shifts).double().cpu().numpy()
