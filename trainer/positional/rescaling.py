"""Context extension as rescalings of a spectrum: PI, NTK-aware, NTK-by-parts, YaRN (DroPE Eq. 3 and
App. A), Llama 3's, LongRoPE, RoPE-ID's (App. A.9), and each with a factor that follows the length.

Those in :data:`RESCALINGS` need nothing but the extension factor s = length / C and are the
identity at s = 1; :func:`dynamic` applies them with the s of the sequence at hand. A spectrum
without rotation comes back unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from trainer.positional.spectrum import Beyond, Spectrum

Rescaling = Callable[[Spectrum, float], Spectrum]
Frequencies = tuple[float, ...]


def _changed(spectrum: Spectrum, change: Callable[[Frequencies], Frequencies]) -> Spectrum:
    """``change`` made to the frequencies at every length; they grow no further with it."""
    beyond = spectrum.beyond
    if beyond is not None:
        beyond = Beyond(beyond.length, change(beyond.inv_freq))
    return replace(spectrum, inv_freq=change(spectrum.inv_freq), beyond=beyond)


def _mixed(inv_freq: Frequencies, factor: float, kept: np.ndarray) -> Frequencies:
    """Every frequency divided by ``factor``, but for a share ``kept`` ``[pairs]`` of it."""
    return tuple(
        float(f / factor * (1 - share) + f * share) for f, share in zip(inv_freq, kept, strict=True)
    )


def position_interpolation(spectrum: Spectrum, factor: float) -> Spectrum:
    """PI (Chen et al. 2023): every frequency divided by s."""
    return _changed(spectrum, lambda inv_freq: tuple(f / factor for f in inv_freq))


def ntk_aware(spectrum: Spectrum, factor: float) -> Spectrum:
    """NTK-aware scaling (bloc97 2023): pair m of M is divided by s^(m / (M - 1)).

    For RoPE this is the base times s^(d / (d - 2)), d = 2 M: the fastest pair stays, the slowest is
    interpolated.
    """
    last = max(len(spectrum.inv_freq) - 1, 1)
    return _changed(
        spectrum,
        lambda inv_freq: tuple(f * factor ** (-m / last) for m, f in enumerate(inv_freq)),
    )


def ntk_by_parts(
    spectrum: Spectrum,
    factor: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Spectrum:
    """NTK-by-parts scaling (bloc97 2023): the frequencies of YaRN, as transformers computes them.

    Pairs that turn more than ``beta_fast`` times in C keep their frequency, those that turn less
    than ``beta_slow`` times are divided by s, with a linear ramp over the pair's index between,
    from and to a whole index with ``truncate``.
    """
    moving = [f for f in spectrum.inv_freq if f > 0]
    if factor == 1 or len(set(moving)) < 2:
        return spectrum
    # Where on the (fractional) index axis a pair turns `turns` times within C.
    step = math.log(moving[0] / moving[-1]) / (len(moving) - 1)

    def index(turns: float) -> float:
        return math.log(moving[0] * spectrum.training_length / (2 * math.pi * turns)) / step

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spectrum.rotary_dim - 1)
    ramp = np.clip((np.arange(len(spectrum.inv_freq)) - low) / max(high - low, 1e-3), 0, 1)
    return _changed(spectrum, lambda inv_freq: _mixed(inv_freq, factor, 1 - ramp))


def yarn(
    spectrum: Spectrum,
    factor: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Spectrum:
    """YaRN (Peng et al. 2023) as transformers computes it.

    NTK-by-parts scaling, and an attention factor of 0.1 ln s + 1 on the rotated channels of queries
    and keys both. Where the whole head rotates, logits are so multiplied by its square.
    """
    slowed = ntk_by_parts(
        spectrum, factor, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate
    )
    if slowed is spectrum:
        return spectrum
    attention_factor = 0.1 * math.log(factor) + 1
    return replace(slowed, rotary_scale=spectrum.rotary_scale * attention_factor)


def yarn_full_range(spectrum: Spectrum, factor: float) -> Spectrum:
    """YaRN-style scaling for encodings that are fast throughout (RoPE-ID, App. A.9).

    The thresholds are the fastest and the slowest pair: the one stays as it is, the other is
    divided by s, those between divided in part, on a ramp that is linear in the pair's index. The
    text does not say over what it interpolates; the index is YaRN's choice in transformers, on
    which RoPE-ID's code is built, and for its log-spaced pairs the logarithm of the frequency.
    There is no attention factor, since RoPE-ID has the same as a temperature of its own.
    """
    moving = sum(f > 0 for f in spectrum.inv_freq)
    if factor == 1 or moving < 2:
        return spectrum
    kept = np.clip(1 - np.arange(len(spectrum.inv_freq)) / (moving - 1), 0, 1)
    return _changed(spectrum, lambda inv_freq: _mixed(inv_freq, factor, kept))


def llama3(
    spectrum: Spectrum,
    factor: float,
    *,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Spectrum:
    """The scaling of Llama 3.1, as transformers computes it.

    Pairs that turn more than ``high_freq_factor`` times in C keep their frequency, those that turn
    less than ``low_freq_factor`` times are divided by s, with a linear ramp over the turns between.
    """
    if factor == 1:
        return spectrum
    turns = np.array(spectrum.inv_freq) * spectrum.training_length / (2 * math.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return _changed(spectrum, lambda inv_freq: _mixed(inv_freq, factor, kept))


def longrope(spectrum: Spectrum, short: Sequence[float], long: Sequence[float]) -> Spectrum:
    """LongRoPE (Ding et al. 2024): every pair divided by a factor of its own, out of ``short`` in
    sequences of up to C tokens and out of ``long`` in longer ones.

    Raises:
        ValueError: there are not as many factors as pairs.
    """
    if not spectrum.rotates:
        return spectrum

    def divided(factors: Sequence[float]) -> tuple[float, ...]:
        return tuple(f / factor for f, factor in zip(spectrum.inv_freq, factors, strict=True))

    beyond = Beyond(spectrum.training_length, divided(long))
    return replace(spectrum, inv_freq=divided(short), beyond=beyond)


def dynamic(spectrum: Spectrum, rescaling: str, growth: float = 1.0) -> Spectrum:
    """A method of :data:`RESCALINGS` with the s of the sequence at hand (DroPE, App. C.2).

    In a sequence of n > C tokens s = 1 + ``growth`` (n / C - 1), which by default is n / C; in a
    shorter one nothing changes. A spectrum that has other frequencies in long sequences already
    keeps them, rescaled beyond C; of two schedules the later one counts.

    Args:
        spectrum: what to rescale.
        rescaling: a key of :data:`RESCALINGS`.
        growth: how fast s grows with the length.
    """
    if not spectrum.rotates:
        return spectrum
    beyond = spectrum.beyond or Beyond(spectrum.training_length, spectrum.inv_freq)
    return replace(spectrum, beyond=replace(beyond, growth=growth, rescaling=rescaling))


def dynamic_ntk(spectrum: Spectrum, factor: float) -> Spectrum:
    """Dynamic NTK (emozilla 2023) as transformers has it: NTK-aware scaling with
    s = 1 + ``factor`` (n / C - 1)."""
    return dynamic(spectrum, "ntk", factor)


def at_length(spectrum: Spectrum, length: int) -> Spectrum:
    """The spectrum for a sequence of ``length`` tokens, the same at any length but for those of
    :func:`longrope` and :func:`dynamic`."""
    beyond = spectrum.beyond
    if beyond is None:
        return spectrum
    if length <= beyond.length:
        return replace(spectrum, beyond=None)
    s = 1 + beyond.growth * (max(length / spectrum.training_length, 1) - 1)
    slow = replace(spectrum, inv_freq=beyond.inv_freq, beyond=None)
    return RESCALINGS[beyond.rescaling](slow, s)


RESCALINGS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "ntk_by_parts": ntk_by_parts,
    "yarn": yarn,
    "llama3": llama3,
    "yarn_full_range": yarn_full_range,
}
"""By name, with the factor given."""

DYNAMIC: dict[str, Callable[[Spectrum], Spectrum]] = {
    name: partial(dynamic, rescaling=name) for name in RESCALINGS
}
"""By name, with the factor of the sequence at hand."""
