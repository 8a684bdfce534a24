"""Positional encodings for training, each a function that returns a :class:`Spectrum`.

To add one, decorate a function with :func:`encoding`; its name becomes the name in configurations
and its keyword-only parameters become the keys under ``positional.encodings.<name>``. A file
outside the package works too: name it in ``plugins``.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from trainer.common.registry import Registry
from trainer.positional.spectrum import Spectrum, Step, Temperature, cope_shares

ENCODINGS = Registry[Callable[..., Spectrum]]("encoding")
"""Encodings by the names of their functions."""

F = TypeVar("F", bound=Callable[..., Spectrum])


def encoding(function: F) -> F:
    """Register an encoding under the name of its function.

    Parameters named ``head_dim`` and ``training_length`` receive the channels of a head and C, in
    tokens. Those after ``*`` are configuration keys with numbers, or None, as defaults. A spectrum
    that rotates remembers all of them but ``head_dim`` as its origin.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def with_origin(*args: Any, **values: Any) -> Spectrum:
        spectrum = function(*args, **values)
        if not spectrum.rotates:
            return spectrum
        bound = signature.bind(*args, **values)
        bound.apply_defaults()
        parameters = {key: value for key, value in bound.arguments.items() if key != "head_dim"}
        return replace(spectrum, origin=(Step(function.__name__, parameters),))

    ENCODINGS.add(function.__name__, with_origin, function)
    return cast("F", with_origin)


def by_name(name: str, head_dim: int, training_length: int, **values: Any) -> Spectrum:
    """Return the spectrum of a registered encoding; ``values``: parameters other than its defaults.

    Raises:
        UserError: the encoding is unknown.
        TypeError: a parameter is unknown.
        ValueError: a parameter has no meaning, or does not fit the model.
    """
    function = ENCODINGS.find(name, "encoding")
    model = {"head_dim": head_dim, "training_length": training_length}
    wanted = {k: model[k] for k in inspect.signature(function).parameters if k in model}
    return function(**wanted, **values)


def rotated_pairs(head_dim: int, fraction: float) -> int:
    """Return the number of pairs that rotate if a ``fraction`` of the channels rotates; raise a
    ValueError if it is an odd number of channels, or no fraction."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"expected a rotary_fraction from 0 to 1, got {fraction:g}")
    rotary_dim = round(head_dim * fraction, 6)  # 100 * 0.14 is 14.000000000000002
    if rotary_dim % 2:
        raise ValueError(f"expected an even number of rotating channels, got {rotary_dim:g}")
    return int(rotary_dim) // 2


def geometric(base: float, pairs: int) -> tuple[float, ...]:
    """Return frequencies ``base ** (-m / pairs)``, m = 0 .. pairs - 1 (Su et al. 2021)."""
    if base <= 0:
        raise ValueError(f"expected a base above 0, got {base:g}")
    return tuple(base ** (-m / pairs) for m in range(pairs))


def between_wavelengths(fastest: float, slowest: float, pairs: int) -> tuple[float, ...]:
    """Return log-spaced frequencies, wavelengths ``fastest`` to ``slowest`` (tokens) included."""
    if not 2 <= fastest < slowest:
        raise ValueError(f"expected 2 <= fastest < slowest wavelength, got {fastest}, {slowest}")
    high, low = math.log(2 * math.pi / fastest), math.log(2 * math.pi / slowest)
    return tuple(math.exp(high + (low - high) * m / max(pairs - 1, 1)) for m in range(pairs))


@encoding
def rope(
    head_dim: int, *, base: float = 10_000.0, rotary_fraction: float = 1.0, angle_scale: float = 1.0
) -> Spectrum:
    """RoPE (Su et al. 2021), on all channels or on the first ``rotary_fraction`` of them.

    ``angle_scale``: factor on all angles. iRoPE as described by Frequency Entropy (Sec. 2.3) uses
    one below 1 from the first step on.
    """
    inv_freq = geometric(base, rotated_pairs(head_dim, rotary_fraction))
    return Spectrum(tuple(angle_scale * f for f in inv_freq))


@encoding
def half_rope(head_dim: int, *, base: float = 10_000.0) -> Spectrum:
    """HalfRoPE (RoPE-ID, Sec. 4): RoPE on half of the channels, none on the rest."""
    return rope(head_dim, base=base, rotary_fraction=0.5)


@encoding
def high_frequency(head_dim: int, training_length: int, *, base: float | None = None) -> Spectrum:
    """RoPE whose slowest pair turns about once in C: base C / 2 pi, 652 at 4096 (RoPE-ID, Sec. 4).

    ``base`` overrides C / 2 pi.
    """
    if base is None:
        base = training_length / (2 * math.pi)
    return rope(head_dim, base=base)


@encoding
def rope_id(
    head_dim: int,
    training_length: int,
    *,
    fastest_wavelength: float = 32.0,
    slowest_wavelength: float | None = None,
    rotary_fraction: float = 0.5,
    temperature: float = 0.1,
    exponent: float = 2.0,
) -> Spectrum:
    """RoPE-ID (App. A.4): half the channels, wavelengths from 32 tokens to C / 2, temperature (1 +
    0.1 ln(max(n, C) / C))^2.

    The C of the temperature is stored, so that it stays 4,096 when a later phase has longer
    sequences, as in the paper's code (App. A.9).

    ``slowest_wavelength`` defaults to C / 2, two full turns in the training length.
    """
    pairs = rotated_pairs(head_dim, rotary_fraction)
    if slowest_wavelength is None:
        slowest_wavelength = training_length / 2
        if slowest_wavelength <= fastest_wavelength:
            raise ValueError(
                f"rope_id needs sequences of more than {2 * fastest_wavelength:g} tokens, twice "
                f"fastest_wavelength, got {training_length}"
            )
    return Spectrum(
        between_wavelengths(fastest_wavelength, slowest_wavelength, pairs),
        Temperature(coefficient=temperature, exponent=exponent, reference=training_length),
    )


@encoding
def p_rope(head_dim: int, *, base: float = 10_000.0, p: float = 0.75) -> Spectrum:
    """p-RoPE (Barbero et al. 2024): RoPE whose slowest (1 - p) of the frequencies are zero.

    The zeros stay in the spectrum, so that pairs are numbered as in full RoPE. If p is not a whole
    number of pairs, the fractional pair does not rotate, as in transformers.
    """
    pairs = rotated_pairs(head_dim, 1.0)
    if not 0 <= p <= 1:
        raise ValueError(f"expected a p from 0 to 1, got {p:g}")
    moving = int(round(p * pairs, 6))  # 0.58 * 50 is 28.999999999999996
    return Spectrum(geometric(base, pairs)[:moving] + (0.0,) * (pairs - moving))


@encoding
def hope(head_dim: int, training_length: int, *, rotary_fraction: float = 0.5) -> Spectrum:
    """HoPE as RoPE-ID characterises it (App. A.6): wavelengths 2 pi .. C on half of the channels.

    RoPE-ID compares with this encoding; :func:`hope_published` is the one of HoPE's authors.
    """
    pairs = rotated_pairs(head_dim, rotary_fraction)
    return Spectrum(between_wavelengths(2 * math.pi, training_length, pairs))


@encoding
def hope_published(head_dim: int, training_length: int, *, base: float = 10_000.0) -> Spectrum:
    """HoPE (Chen et al. 2024): RoPE whose pairs with a wavelength of more than C are zero.

    At a base of 500,000, 80 channels and C = 4096 half of the channels rotate, as RoPE-ID reports
    for HoPE at 1B (App. A.6).
    """
    slowest = 2 * math.pi / training_length
    frequencies = geometric(base, rotated_pairs(head_dim, 1.0))
    return Spectrum(tuple(f if f >= slowest else 0.0 for f in frequencies))


@encoding
def cope(head_dim: int, *, base: float = 10_000.0, clipped: int = 20) -> Spectrum:
    """CoPE (arXiv 2602.05258): RoPE whose ``clipped`` slowest pairs fade out, see
    :func:`~trainer.positional.spectrum.cope_shares`."""
    frequencies = geometric(base, rotated_pairs(head_dim, 1.0))
    shares = cope_shares(len(frequencies), clipped)
    return Spectrum(tuple(f * share for f, share in zip(frequencies, shares, strict=True)))


@encoding
def nope(*, temperature: float = 0.0) -> Spectrum:
    """No positional encoding (Kazemnejad et al. 2023), optionally with temperature 1 + c ln s."""
    return Spectrum(temperature=Temperature(coefficient=temperature))


@encoding
def alibi() -> Spectrum:
    """ALiBi (Press et al. 2021): a bias linear in the distance; see :func:`alibi_slopes`."""
    return Spectrum(alibi=True)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of every query head (Press, Smith and Lewis 2021, Sec. 3).

    For a power of two: 2^(-8/heads), 2^(-16/heads), ..., 2^-8. Otherwise the slopes of the power of
    two below, then every second slope of the power of two above, as in the published code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return tuple(slopes + between[: heads - power])
