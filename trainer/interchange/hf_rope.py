"""Spectrum from the ``rope_parameters`` of a Hugging Face config.json, and the reverse.

Older files call the parameters ``rope_scaling``. Every rope type of transformers 5
(``modeling_rope_utils.py``) is a rescaling of RoPE's spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from trainer.common.errors import UserError
from trainer.positional.encodings import geometric
from trainer.positional.rescaling import (
    dynamic,
    llama3,
    longrope,
    ntk_aware,
    rescaled,
    yarn,
)
from trainer.positional.spectrum import LongFrequencies, Spectrum

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""The keys that each type cannot do without."""

STILL = 1e-20
"""Radians per token below which a pair does not turn in any sequence."""
_OTHERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", "rope_type", "type", "truncate", "partial_rotary_factor"),
    "finetuned",
)


Parameters = dict[str, Any]
Frequencies = tuple[float, ...]

PRECISION = 1e-8
"""Relative; transformers computes frequencies in float32, to 1e-7."""
STANDSTILL = 1e30
"""Factor that divides the frequency of a pair that does not rotate."""
NO_ROTATION: Parameters = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": STANDSTILL,
    "low_freq_factor": 8192.0,
    "high_freq_factor": 16384.0,
    "original_max_position_embeddings": 2,
}
"""Parameters that leave queries and keys as they are.

Every wavelength, at least 2 pi, is above original_max_position_embeddings / low_freq_factor, so all
frequencies are divided. That also holds for 8192, which llama.cpp's converter takes as the original
length of a file that does not name one beside the parameters. ``proportional`` with a share of 0
says the same more plainly, and vLLM refuses it.
"""


@dataclass(frozen=True)
class _Rope:
    """Checked parameters; ``values`` contains no null."""

    values: Mapping[str, Any]
    head_dim: int
    training_length: int

    @property
    def original_length(self) -> int:
        """Training length in tokens before the described extension."""
        return self.values.get("original_max_position_embeddings", self.training_length)

    @property
    def factor(self) -> float:
        """Ratio of the lengths after and before the extension, unless given explicitly."""
        return self.values.get("factor", self.training_length / self.original_length)

    @property
    def plain(self) -> Spectrum:
        """RoPE on the first ``partial_rotary_factor`` of the channels."""
        rotary_dim = int(self.head_dim * self.values.get("partial_rotary_factor", 1.0))
        return Spectrum(geometric(self.values["rope_theta"], rotary_dim // 2))


def spectrum_from_rope_parameters(
    values: Mapping[str, Any], head_dim: int, training_length: int
) -> Spectrum:
    """Return the spectrum that transformers computes from these parameters.

    ``values``: ``rope_type`` (or ``type``), ``rope_theta`` and the keys of the type.
    ``original_max_position_embeddings``, the length before the extension, defaults to the training
    length C, which is ``max_position_embeddings``. ``head_dim`` is even.

    Raises:
        UserError: the type is unknown, or keys are unknown, missing or wrong.
    """
    stated = {key: value for key, value in values.items() if value is not None}
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    if unknown := stated.keys() - {*_OTHERS}:
        raise UserError(f"rope_parameters: unknown keys {', '.join(sorted(unknown))}")
    for key in ("rope_theta", *ROPE_TYPES[kind]):
        if key not in stated:
            raise UserError(f"rope_parameters.{key}: missing for the type {kind!r}")
    spectrum = _SPECTRA[kind](_Rope(stated, head_dim, training_length))
    # Files divide frequencies by a huge factor if their type cannot express 0.
    return replace(spectrum, inv_freq=tuple(f if f > STILL else 0.0 for f in spectrum.inv_freq))


def _interpolated(spectrum: Spectrum, factor: float) -> Spectrum:
    inv_freq = tuple(f / factor for f in spectrum.inv_freq)
    return replace(spectrum, inv_freq=inv_freq)


def _proportional(rope: _Rope) -> Spectrum:
    """Rotate the fastest ``partial_rotary_factor`` of all pairs; the others have frequency 0."""
    pairs = rope.head_dim // 2
    rotating = int(rope.values.get("partial_rotary_factor", 1.0) * pairs)
    inv_freq = geometric(rope.values["rope_theta"], pairs)[:rotating] + (0.0,) * (pairs - rotating)
    return _interpolated(Spectrum(inv_freq), rope.values.get("factor", 1.0))


def _yarn(rope: _Rope) -> Spectrum:
    """Return YaRN's spectrum; the attention factor defaults to 0.1 ln s + 1, or is given as a
    quotient."""
    known = {key: rope.values[key] for key in ("beta_fast", "beta_slow") if key in rope.values}
    truncate = rope.values.get("truncate", True)
    rescaling = partial(yarn, truncate=truncate, **known)

    def scale(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(max(rope.factor, 1.0)) + 1.0

    above, below = rope.values.get("mscale"), rope.values.get("mscale_all_dim")
    inferred = scale(above) / scale(below) if above and below else scale(1.0)
    attention = rope.values.get("attention_factor", inferred)
    slowed = rescaled(rope.plain, rescaling, rope.original_length, rope.factor)
    return replace(slowed, rotary_scale=attention)


def _longrope(rope: _Rope) -> Spectrum:
    """Return LongRoPE's spectrum; attention factor sqrt(1 + ln s / ln L), L the original length."""
    scaled = longrope(
        rope.plain,
        rope.values["short_factor"],
        rope.values["long_factor"],
        rope.original_length,
    )
    stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_length)
    scale = rope.values.get("attention_factor", math.sqrt(1 + stretch))
    return replace(scaled, rotary_scale=scale)


def _llama3(rope: _Rope) -> Spectrum:
    """Return the spectrum of Llama 3.1's scaling."""
    rescaling = partial(
        llama3,
        low_freq_factor=rope.values["low_freq_factor"],
        high_freq_factor=rope.values["high_freq_factor"],
    )
    return rescaled(rope.plain, rescaling, rope.original_length, rope.factor)


_SPECTRA: dict[str, Callable[[_Rope], Spectrum]] = {
    "default": lambda rope: rope.plain,
    "linear": lambda rope: _interpolated(rope.plain, rope.factor),
    "dynamic": lambda rope: dynamic(
        rope.plain, ntk_aware, rope.training_length, growth=rope.factor
    ),
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def rope_parameters(spectrum: Spectrum, head_dim: int, training_length: int) -> Parameters | None:
    """Return parameters with which transformers rotates all pairs of a head like this spectrum.

    Prefers the most specific type that fits: ``default``, ``linear``, ``dynamic``,
    ``proportional``, ``llama3``, ``yarn``; otherwise ``longrope``, which can express any
    frequencies; None if no type fits. ``yarn`` and ``longrope`` also express the scale of rotated
    channels. The caller handles the rest of that scale and the temperature. Pairs that the spectrum
    lacks, at the end of the head, do not rotate.
    """
    for candidate in _candidates(spectrum, head_dim, training_length):
        with suppress(ValueError):  # a candidate may be out of bounds
            read_back = spectrum_from_rope_parameters(candidate, head_dim, training_length)
            if _rotate_alike(read_back, spectrum, head_dim // 2, training_length):
                return candidate
    return None


def whole_head(inv_freq: Frequencies, pairs: int) -> Frequencies:
    """Pad ``inv_freq`` with zeros to ``pairs`` entries."""
    return inv_freq + (0.0,) * (pairs - len(inv_freq))


def _rotate_alike(read_back: Spectrum, wanted: Spectrum, pairs: int, training_length: int) -> bool:
    def close(a: Frequencies, b: Frequencies) -> bool:
        both = zip(whole_head(a, pairs), whole_head(b, pairs), strict=True)
        return all(math.isclose(x, y, rel_tol=PRECISION, abs_tol=1e-12) for x, y in both)

    if not close(read_back.inv_freq, wanted.inv_freq):
        return False
    theirs, ours = read_back.long, wanted.long
    if theirs is None or ours is None:
        return theirs is ours or (theirs is not None and close(theirs.inv_freq, read_back.inv_freq))
    return (
        close(theirs.inv_freq, ours.inv_freq)
        and theirs.length == ours.length
        and _stretches_alike(theirs, ours, training_length)
    )


def _stretches_alike(held: LongFrequencies, wanted: LongFrequencies, training_length: int) -> bool:
    if held.stretch is None or wanted.stretch is None:
        return held.stretch is wanted.stretch
    references = [long.reference or training_length for long in (held, wanted)]
    growth = math.isclose(held.growth, wanted.growth)
    return held.stretch == wanted.stretch and growth and references[0] == references[1]


def _candidates(spectrum: Spectrum, head_dim: int, training_length: int) -> Iterator[Parameters]:
    """Yield every candidate worth a comparison."""
    pairs = head_dim // 2
    moving = [f for f in spectrum.inv_freq if f > 0]
    if not moving:
        yield dict(NO_ROTATION)
        return
    theta, factor = 10_000.0, _short(1 / moving[0])
    if len(moving) > 1:
        theta = _short((moving[0] / moving[-1]) ** (pairs / (len(moving) - 1)))
    default: Parameters = {"rope_type": "default", "rope_theta": theta}
    yield default
    yield default | {"rope_type": "linear", "factor": factor}
    if spectrum.long is not None:
        yield default | {"rope_type": "dynamic", "factor": spectrum.long.growth}
    # int() truncates 28.999... to 28.
    exact = int(len(moving) / pairs * pairs) == len(moving)
    share = {"partial_rotary_factor": (len(moving) if exact else len(moving) + 0.5) / pairs}
    yield default | {"rope_type": "proportional"} | share
    yield default | {"rope_type": "proportional", "factor": factor} | share
    if len(moving) == pairs:
        # Outside the ramps of YaRN and Llama 3, neighbours differ by the ratio of plain RoPE.
        steps = (_short((a / b) ** pairs) for a, b in pairwise(moving))
        for base in dict.fromkeys(steps):
            if base > 1:
                yield from _ramps(spectrum, base, training_length)
    yield _any_frequencies(spectrum, pairs, training_length)


def _ramps(spectrum: Spectrum, theta: float, length: int) -> Iterator[Parameters]:
    """Yield types that divide slow pairs by a factor, fast pairs by 1, others on a ramp."""
    plain = geometric(theta, len(spectrum.inv_freq))
    shares = [f / g for f, g in zip(spectrum.inv_freq, plain, strict=True)]
    factor = _short(1 / shares[-1])
    if not factor > 1:
        return
    common = {"rope_theta": theta, "factor": factor}
    shares_kept = [(share - 1 / factor) / (1 - 1 / factor) for share in shares]
    between = [(f, k) for f, k in zip(plain, shares_kept, strict=True) if 1e-6 < k < 1 - 1e-6]
    if len(between) > 1:
        # The kept share is linear in the frequency: 0 at one turn, 1 at the fast end.
        (f, kept_f), (g, kept_g) = between[0], between[-1]
        slope = (kept_f - kept_g) / (f - g)
        slow, fast = f - kept_f / slope, f + (1 - kept_f) / slope
        if 0 < slow < fast:
            yield common | {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": _short(fast / slow),
                "original_max_position_embeddings": round(2 * math.pi / slow),
            }
    attention = spectrum.rotary_scale * math.sqrt(spectrum.temperature.scale)
    # Omit YaRN's default: not every engine reads the key.
    usual = math.isclose(attention, 0.1 * math.log(factor) + 1, rel_tol=1e-9)
    beside = {} if usual else {"attention_factor": attention}
    for original in dict.fromkeys((round(length / factor), length)):
        for truncate in (True, False):
            yield (
                common
                | beside
                | {
                    "rope_type": "yarn",
                    "original_max_position_embeddings": original,
                    "truncate": truncate,
                }
            )


def _any_frequencies(spectrum: Spectrum, pairs: int, length: int) -> Parameters:
    """Return LongRoPE parameters with a factor for every pair."""
    long = spectrum.long
    original = length if long is None else long.length
    theta = 10_000.0

    def factors(inv_freq: Frequencies) -> list[float]:
        both = zip(geometric(theta, pairs), whole_head(inv_freq, pairs), strict=True)
        return [g / f if f else STANDSTILL for g, f in both]

    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": max(length / original, 1.0),
        "short_factor": factors(spectrum.inv_freq),
        "long_factor": factors(spectrum.inv_freq if long is None else long.inv_freq),
        "original_max_position_embeddings": original,
        "attention_factor": spectrum.rotary_scale,
    }


def _short(value: float) -> float:
    """Return the shortest decimal number within rounding: 10000 for 9999.999999."""
    digits = (float(f"{value:.{n}g}") for n in range(1, 17))
    return next((d for d in digits if math.isclose(d, value, rel_tol=1e-11)), value)
