"""Context extension as rescalings of a spectrum, each with a fixed factor or one by length.

A function that :func:`rescaling` registers takes frequencies and the length they were trained at.
It returns a :class:`Stretch`, which says how an extension by any factor s = length / C slows them.
:func:`rescaled` applies it with a fixed s, :func:`dynamic` with the s of each sequence.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from trainer.common.registry import Registry
from trainer.positional.spectrum import Frequencies, LongFrequencies, Spectrum, Stretch, cope_shares

GEOMETRIC = 1e-4
"""Tolerance on the steps between neighbouring pairs of a geometric spectrum, relative: it may have
been read from float32 tables."""
Rescaling = Callable[[Frequencies, int], Stretch]
"""Method of context extension: how to slow frequencies that were trained at a length."""
R = TypeVar("R", bound=Callable[..., Stretch])

RESCALINGS = Registry[Rescaling]("rescaling")
"""Methods of context extension by name."""
TITLES: dict[str, str] = {}
"""Their titles in tables."""


def rescaling(name: str, title: str) -> Callable[[R], R]:
    """Register a function as the rescaling of a name, which a run's phases and an evaluation's
    methods then know; use it in a file that ``plugins`` names, too."""

    def register(function: R) -> R:
        RESCALINGS.add(name, function, function)
        TITLES[name] = title
        return function

    return register


def _named(method: Rescaling) -> tuple[str, dict[str, Any]]:
    """Return the name of a method's function and its options, for an origin."""
    if isinstance(method, partial):
        return method.func.__name__, method.keywords
    return method.__name__, {}


def _by_share(shares: np.ndarray) -> Stretch:
    """Divide every frequency by s, except for a share ``[pairs]`` of it."""
    return Stretch(tuple(shares.tolist()), (1.0,) * len(shares))


def _has_order(inv_freq: Frequencies) -> bool:
    """Whether some pair is slower than another, as the ramps of YaRN's family require."""
    return len({f for f in inv_freq if f > 0}) > 1


def _geometric_step(moving: Sequence[float]) -> float | None:
    """Return ln(f_m / f_{m+1}) if it is the same for all neighbours; None if it is not."""
    step = math.log(moving[0] / moving[-1]) / (len(moving) - 1)
    steps = -np.diff(np.log(moving))
    return step if np.allclose(steps, step, rtol=GEOMETRIC, atol=0) else None


def _indices(inv_freq: Frequencies) -> tuple[np.ndarray, float]:
    """Return each pair's place among geometric frequencies of the same range, and their step in the
    logarithm.

    The place of pair m is m if the frequencies are geometric; without a turn it is beyond all.
    """
    moving = [f for f in inv_freq if f > 0]
    step = math.log(max(moving) / min(moving)) / (len(moving) - 1)
    known = np.maximum(inv_freq, np.finfo(float).tiny)
    return np.log(max(moving) / known) / step, step


@rescaling("pi", "PI")
def position_interpolation(inv_freq: Frequencies, training_length: int) -> Stretch:
    """PI (Chen et al. 2023): every frequency divided by s."""
    return Stretch((0.0,) * len(inv_freq), (1.0,) * len(inv_freq))


@rescaling("ntk", "NTK-aware")
def ntk_aware(inv_freq: Frequencies, training_length: int) -> Stretch:
    """NTK-aware scaling (bloc97 2023): pair m of M is divided by s^(m / (M - 1)).

    For RoPE this is the base times s^(d / (d - 2)), d = 2 M: the fastest pair stays, the slowest is
    interpolated. DroPE's Eq. 10, read literally, would slow the fastest pair as well.
    """
    last = max(len(inv_freq) - 1, 1)
    return Stretch((0.0,) * len(inv_freq), tuple(m / last for m in range(len(inv_freq))))


@rescaling("ntk_by_parts", "NTK-by-parts")
def ntk_by_parts(
    inv_freq: Frequencies,
    training_length: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Stretch:
    """NTK-by-parts scaling (bloc97 2023): the frequencies of YaRN, as transformers computes them.

    Pairs that turn more than ``beta_fast`` times in C keep their frequency, those that turn less
    than ``beta_slow`` times are divided by s. The ramp between them is linear in the pair's index,
    and so in the logarithm of its turns, also where frequencies are not geometric (Llama 3.1's).
    ``truncate`` rounds its ends to whole indices, which only geometric frequencies have.
    """
    if not _has_order(inv_freq):
        return _by_share(np.ones(len(inv_freq)))
    indices, step = _indices(inv_freq)
    turns = max(inv_freq) * training_length / (2 * math.pi)
    low = math.log(turns / beta_fast) / step
    high = math.log(turns / beta_slow) / step
    if truncate and _geometric_step([f for f in inv_freq if f > 0]) is not None:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * len(inv_freq) - 1)
    ramp = np.clip((indices - low) / max(high - low, 1e-3), 0, 1)
    return _by_share(1 - ramp)


@rescaling("yarn", "YaRN")
def yarn(inv_freq: Frequencies, training_length: int, **ramp: Any) -> Stretch:
    """YaRN (Peng et al. 2023) as transformers computes it.

    :func:`ntk_by_parts` with its options ``ramp``, and an attention factor of 0.1 ln s + 1 on the
    rotated channels of both queries and keys: where the whole head rotates, logits are multiplied
    by its square, the paper's temperature. As in transformers, pairs with frequency zero have it
    too (p-RoPE), and channels that do not rotate have none (HalfRoPE).
    """
    return replace(ntk_by_parts(inv_freq, training_length, **ramp), attention=0.1)


@rescaling("llama3", "Llama 3")
def llama3(
    inv_freq: Frequencies,
    training_length: int,
    *,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Stretch:
    """Scaling of Llama 3.1, as transformers computes it.

    Pairs that turn more than ``high_freq_factor`` times in C keep their frequency, pairs that turn
    less than ``low_freq_factor`` times are divided by s. The ramp between them is linear in the
    turns, and thus in the frequency.
    """
    turns = np.array(inv_freq) * training_length / (2 * math.pi)
    share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return _by_share(np.clip(share, 0, 1))


@rescaling("yarn_full_range", "YaRN over all frequencies")
def yarn_full_range(inv_freq: Frequencies, training_length: int) -> Stretch:
    """YaRN-style scaling for encodings that are fast throughout (RoPE-ID, App. A.9).

    The fastest pair stays as it is, the slowest is divided by s, and the ramp between them is
    linear in the logarithm of the frequency, which for RoPE-ID's log-spaced pairs is the pair's
    index (the paper does not say over what it interpolates). RoPE-ID has a temperature of its own
    in place of an attention factor.
    """
    if not _has_order(inv_freq):
        return _by_share(np.ones(len(inv_freq)))
    indices, _ = _indices(inv_freq)
    return _by_share(np.clip(1 - indices / (sum(f > 0 for f in inv_freq) - 1), 0, 1))


@rescaling("ntk_by_parts_turns", "NTK-by-parts over turns")
def ntk_by_parts_turns(inv_freq: Frequencies, training_length: int) -> Stretch:
    """NTK-by-parts scaling as published (Peng et al. 2023; DroPE Eq. 11; DoPE App. A.2).

    It is :func:`llama3` with 1 and 32 turns; :func:`ntk_by_parts` is the usual implementation.
    """
    return llama3(inv_freq, training_length, high_freq_factor=32.0)


@rescaling("yarn_turns", "YaRN over turns")
def yarn_turns(inv_freq: Frequencies, training_length: int) -> Stretch:
    """YaRN as published (Peng et al. 2023): :func:`ntk_by_parts_turns` and :func:`yarn`'s attention
    factor. DroPE's Eq. 11 has the frequencies alone."""
    return replace(ntk_by_parts_turns(inv_freq, training_length), attention=0.1)


@rescaling("cope", "CoPE")
def cope(inv_freq: Frequencies, training_length: int, *, clipped: int = 20) -> Stretch:
    """CoPE (arXiv 2602.05258): the slowest pairs fade out, by the same shares at every s above 1.

    The paper clips 20 of 64 pairs; see :func:`~trainer.positional.spectrum.cope_shares`.
    """
    always = sys.float_info.max  # s to this power is infinite; a stored layout has finite numbers
    return Stretch(cope_shares(len(inv_freq), clipped), (always,) * len(inv_freq))


def long_frequencies(spectrum: Spectrum, training_length: int) -> LongFrequencies:
    """Return a spectrum's frequencies in the longest sequences, from which an extension starts.

    A schedule is evaluated at C, the longest sequences that the model was trained on, and fixed
    there. If all sequences have the same frequencies, these begin at C.
    """
    long = spectrum.long
    if long is None:
        return LongFrequencies(training_length, spectrum.inv_freq)
    if long.stretch is None or training_length <= long.length:
        return LongFrequencies(long.length, long.inv_freq)
    at_end = spectrum.at(training_length, training_length)
    return LongFrequencies(long.length, at_end.inv_freq)


def rescaled(
    spectrum: Spectrum, method: Rescaling, training_length: int, factor: float
) -> Spectrum:
    """Slow a spectrum for an extension by ``factor`` in sequences of every length.

    If long sequences have other frequencies, the method slows those by its own rule for them, and
    they no longer follow the length.
    """
    if factor == 1 or not spectrum.rotates:
        return spectrum
    name, options = _named(method)
    stretch = method(spectrum.inv_freq, training_length)
    inv_freq = stretch.frequencies(spectrum.inv_freq, factor)
    long = long_frequencies(spectrum, training_length)
    others = method(long.inv_freq, training_length).frequencies(long.inv_freq, factor)
    return replace(
        spectrum,
        inv_freq=inv_freq,
        rotary_scale=spectrum.rotary_scale + stretch.attention * math.log(factor),
        long=None if others == inv_freq else LongFrequencies(long.length, others),
        origin=spectrum.after(name, factor=factor, training_length=training_length, **options),
    )


def rebased(spectrum: Spectrum, base: float) -> Spectrum:
    """Replace the base of a geometric spectrum: pair m of M turns by a base^(-m/M) a token.

    a is 1 for RoPE, and stays whatever ``angle_scale`` or PI made it. Pairs with frequency zero
    stay so (p-RoPE). Code Llama (arXiv 2308.12950, Sec. 2.4) and SmolLM3 were extended like this.
    Raise a ValueError if the frequencies are not geometric, or depend on the length.
    """
    moving = [f for f in spectrum.inv_freq if f > 0]
    if len(moving) < 2:
        return spectrum
    step = _geometric_step(moving)
    if step is None or spectrum.long is not None:
        raise ValueError("frequencies that are not geometric have no base to replace")
    pairs = len(spectrum.inv_freq)
    a = moving[0] * math.exp(step * spectrum.inv_freq.index(moving[0]))
    changed = (a * base ** (-m / pairs) if f else 0.0 for m, f in enumerate(spectrum.inv_freq))
    return replace(spectrum, inv_freq=tuple(changed), origin=spectrum.after("rebased", base=base))


def dynamic(
    spectrum: Spectrum, method: Rescaling, training_length: int, growth: float = 1.0
) -> Spectrum:
    """Slow a spectrum by the s of each sequence (DroPE, App. C.2).

    In a sequence of n > C tokens s = 1 + ``growth`` (n / C - 1), which by default is n / C; in a
    shorter one nothing changes. C is stored, so that the schedule stays the same when a later phase
    has longer sequences.

    If long sequences already have other frequencies, they keep them, rescaled beyond C. A second
    schedule replaces the first one and starts from its frequencies at C.

    With :func:`ntk_aware` and transformers' ``factor`` as ``growth`` this is dynamic NTK (emozilla
    2023; DoPE App. A.2): s = alpha n / C - (alpha - 1).
    """
    if not spectrum.rotates:
        return spectrum
    long = long_frequencies(spectrum, training_length)
    stretch = method(long.inv_freq, training_length)
    long = replace(long, stretch=stretch, growth=growth, reference=training_length)
    name, options = _named(method)
    origin = spectrum.after("dynamic", method=name, growth=growth, **options)
    return replace(spectrum, long=long, origin=origin)


def longrope(
    spectrum: Spectrum, short: Sequence[float], long: Sequence[float], training_length: int
) -> Spectrum:
    """Apply LongRoPE (Ding et al. 2024): divide every pair by its own factor.

    Factors are from ``short`` in sequences of up to C tokens and from ``long`` in longer ones. If
    both give equal frequencies, the spectrum does not depend on the length. If long sequences
    already have other frequencies, ``long`` divides those, from the length on at which they begin.
    Raise a ValueError if there are not as many factors as pairs.
    """
    if not spectrum.rotates:
        return spectrum
    before = long_frequencies(spectrum, training_length)
    short_freq = tuple(f / x for f, x in zip(spectrum.inv_freq, short, strict=True))
    long_freq = tuple(f / x for f, x in zip(before.inv_freq, long, strict=True))
    others = None if short_freq == long_freq else LongFrequencies(before.length, long_freq)
    origin = spectrum.after("longrope", training_length=before.length)
    return replace(spectrum, inv_freq=short_freq, long=others, origin=origin)
