"""Frequency entropy: how concentrated the spectrum of a rotary pair's norm along a text is
(Probing Rotary Position Embeddings through Frequency Entropy, Sec. 3).

The signal of a pair is its l2 norm at every position (Eq. 4). Both entropies lie between 0, a pure
tone, and 1, white noise. SpectrumFE is low where a pair's norm stays high or low throughout (a
frequency band), SequenceFE where it oscillates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.analysis.capture import Heads, capture
from trainer.analysis.pairs import of_pairs, pair_counts, pair_norms
from trainer.analysis.short_time import USUAL, ShortTime
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel

TAPERS: dict[str, Callable[..., Tensor]] = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "rectangular": torch.ones,
}
"""By the names of :data:`~trainer.analysis.short_time.WINDOWS`."""


def spectrum_fe(signal: Tensor, frames: ShortTime = USUAL) -> Tensor:
    """SpectrumFE (Eq. 5 to 7): entropy of the power of overlapping frames, averaged over them.

    Args:
        signal: ``[..., T]``; tokens after the last whole frame are left out.
        frames: how long, how far apart and under which window.

    Returns:
        ``[...]`` float64, between 0 and 1.

    Raises:
        UserError: the signal is shorter than a frame, or the frames are impossible.
    """
    if problems := frames.problems():
        raise UserError(*problems)
    if signal.shape[-1] < frames.frame:
        raise UserError.at(
            "SpectrumFE",
            f"expected a text of {frames.frame} tokens (one frame) or more, got "
            f"{signal.shape[-1]}; choose a longer text or a shorter frame.",
        )
    taper = TAPERS[frames.window](frames.frame, dtype=torch.float64, device=signal.device)
    cut = signal.double().unfold(-1, frames.frame, frames.step) * taper
    return _normalised_entropy(torch.fft.rfft(cut).abs().square().mean(dim=-2))


def sequence_fe(signal: Tensor) -> Tensor:
    """SequenceFE (Eq. 8 to 10): entropy of the power of the whole signal at 1 <= k < floor(T / 2).

    Args:
        signal: ``[..., T]``.

    Returns:
        ``[...]`` float64, between 0 and 1.

    Raises:
        UserError: there are fewer than two frequencies.
    """
    length = signal.shape[-1]
    if length < 6:
        raise UserError.at("SequenceFE", f"expected a text of 6 tokens or more, got {length}.")
    power = torch.fft.rfft(signal.double()).abs().square()
    return _normalised_entropy(power[..., 1 : length // 2])


def _normalised_entropy(power: Tensor) -> Tensor:
    """Of ``[..., K]``, over log K; 0 where there is no power at all."""
    share = power / power.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(power.dtype).tiny)
    return (torch.special.entr(share).sum(dim=-1) / math.log(power.shape[-1])).clamp(max=1)


MEASURES: dict[str, Callable[..., Tensor]] = {
    "spectrum": spectrum_fe,
    "sequence": lambda signal, frames=USUAL: sequence_fe(signal),
}
"""Of a signal and the frames, which the first alone has."""


@dataclass(frozen=True)
class FrequencyEntropy:
    """Of the pairs of one layer: by measure, ``[Hq, pairs]`` of queries and ``[Hkv, pairs]`` of
    keys, float64 on the CPU; NaN where a head has fewer pairs than another of its layer."""

    query: dict[str, Tensor]
    key: dict[str, Tensor]


def frequency_entropies(
    model: LanguageModel,
    ids: Tensor,
    measures: Sequence[str] = tuple(MEASURES),
    frames: ShortTime = USUAL,
) -> list[FrequencyEntropy]:
    """The frequency entropies of every layer, from one forward pass.

    Norms are taken before the encoding: the rotation keeps them, and the temperature is not theirs.

    Args:
        model: a decoder, with the layout to measure.
        ids: ``[B, T]`` texts; entropies are averaged over them.
        measures: names in :data:`MEASURES`.
        frames: of SpectrumFE.

    Raises:
        UserError: the texts are too short for a measure.
    """
    found: list[FrequencyEntropy] = []

    # Told before any reading.
    for name in measures:
        MEASURES[name](torch.ones(ids.shape[1]), frames)
    capture(model, ids, lambda heads: found.append(frequency_entropy_of(heads, measures, frames)))
    return found


def frequency_entropy_of(
    heads: Heads, measures: Sequence[str] = tuple(MEASURES), frames: ShortTime = USUAL
) -> FrequencyEntropy:
    """Of one captured layer; raises what :func:`frequency_entropies` does."""
    return FrequencyEntropy(*(_of_side(heads, x, measures, frames) for x in (heads.q, heads.k)))


def _of_side(
    heads: Heads, x: Tensor, measures: Sequence[str], frames: ShortTime
) -> dict[str, Tensor]:
    """A head at a time, since the frames of all heads take several times their memory."""
    counts = pair_counts(heads.encoding, x.shape[1], x.shape[-1])
    rows: dict[str, list[Tensor]] = {name: [] for name in measures}
    for head, pairs in zip(x.unbind(1), counts, strict=True):
        signal = pair_norms(head, pairs)
        for name in measures:
            rows[name].append(MEASURES[name](signal, frames).mean(dim=0))
    return {name: of_pairs(values).cpu() for name, values in rows.items()}
