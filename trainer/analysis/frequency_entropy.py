"""Frequency entropy: how concentrated the spectrum of a rotary pair's norm along a text is (Probing
Rotary Position Embeddings through Frequency Entropy, Sec. 3).

The signal of a pair is its l2 norm at every position (Eq. 4). Both entropies lie between 0, a pure
tone, and 1, white noise. SpectrumFE is low where a pair's norm stays high or low throughout (a
frequency band), SequenceFE where it oscillates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.analysis.attention import (
    Heads,
    Side,
    capture,
    pair_counts,
    pair_norms,
    stack_heads,
)
from trainer.common.errors import UserError
from trainer.config import USUAL, ShortTime
from trainer.model.language_model import LanguageModel

TAPERS: dict[str, Callable[..., Tensor]] = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "rectangular": torch.ones,
}
"""Windows by their names in :data:`~trainer.config.Window`."""


def spectrum_fe(signal: Tensor, frames: ShortTime = USUAL) -> Tensor:
    """Compute SpectrumFE (Eq. 5 to 7), the entropy of the mean power of overlapping frames:
    ``[...]`` float64, between 0 and 1.

    Tokens of the ``signal`` ``[..., T]`` after the last whole frame are ignored.

    Raises:
        UserError: the signal is shorter than a frame.
    """
    if signal.shape[-1] < frames.frame:
        raise UserError(
            f"SpectrumFE: expected a text of {frames.frame} tokens (one frame) or more, got "
            f"{signal.shape[-1]}"
        )
    taper = TAPERS[frames.window](frames.frame, dtype=torch.float64, device=signal.device)
    cut = signal.double().unfold(-1, frames.frame, frames.step) * taper
    return _normalised_entropy(torch.fft.rfft(cut).abs().square().mean(dim=-2))


def sequence_fe(signal: Tensor) -> Tensor:
    """Compute SequenceFE (Eq. 8 to 10), the entropy of the power of the whole signal ``[..., T]``
    at 1 <= k < floor(T / 2): ``[...]`` float64, between 0 and 1.

    Raises:
        UserError: there are fewer than two frequencies.
    """
    length = signal.shape[-1]
    if length < 6:
        raise UserError(f"SequenceFE: expected a text of 6 tokens or more, got {length}")
    power = torch.fft.rfft(signal.double()).abs().square()
    return _normalised_entropy(power[..., 1 : length // 2])


def _normalised_entropy(power: Tensor) -> Tensor:
    """Compute the entropy of ``[..., K]`` over log K; 0 if there is no power."""
    share = power / power.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(power.dtype).tiny)
    return (torch.special.entr(share).sum(dim=-1) / math.log(power.shape[-1])).clamp(max=1)


NAMES = {"spectrum": "SpectrumFE", "sequence": "SequenceFE"}
MEASURES: dict[str, Callable[..., Tensor]] = {
    "spectrum": spectrum_fe,
    "sequence": lambda signal, frames=USUAL: sequence_fe(signal),
}
"""Functions of a signal and the frames; SequenceFE ignores the frames."""


FrequencyEntropy = dict[tuple[str, Side], Tensor]
"""Entropies of the pairs of one layer by measure and side, ``[H, pairs]`` float64 on the CPU; NaN
where a head has fewer pairs than another of its layer."""


def frequency_entropies(
    model: LanguageModel,
    ids: Tensor,
    measures: Sequence[str] = tuple(MEASURES),
    frames: ShortTime = USUAL,
) -> list[FrequencyEntropy]:
    """Compute the frequency entropies of every layer, with one text in memory at a time.

    Norms are taken before the encoding: a rotation does not change them, and a temperature would.
    ``ids``: ``[B, T]`` texts; entropies are averaged over them. ``measures``: names in
    :data:`MEASURES`.

    Raises:
        UserError: the texts are too short for a measure.
    """
    texts = [
        capture(model, text[None], lambda heads: frequency_entropy_of(heads, measures, frames))
        for text in ids
    ]
    return [
        {key: torch.stack([entropies[key] for entropies in layer]).mean(dim=0) for key in layer[0]}
        for layer in zip(*texts, strict=True)
    ]


def frequency_entropy_of(
    heads: Heads, measures: Sequence[str] = tuple(MEASURES), frames: ShortTime = USUAL
) -> FrequencyEntropy:
    """Compute the entropies of one captured layer; raises as :func:`frequency_entropies` does."""
    entropies: FrequencyEntropy = {}
    sides: dict[Side, Tensor] = {"query": heads.q, "key": heads.k}
    for side, x in sides.items():
        counts = pair_counts(heads.encoding, x.shape[1], x.shape[-1])
        rows: dict[str, list[Tensor]] = {name: [] for name in measures}
        # Head by head: the frames of all heads would take several times their memory.
        for head, pairs in zip(x.unbind(1), counts, strict=True):
            signal = pair_norms(head, pairs)
            for name in measures:
                rows[name].append(MEASURES[name](signal, frames).mean(dim=0))
        entropies |= {(name, side): stack_heads(values).cpu() for name, values in rows.items()}
    return entropies
