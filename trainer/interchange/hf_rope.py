"""Spectrum from the ``rope_parameters`` of a Hugging Face config.json, and the reverse.

Older files call the parameters ``rope_scaling``. Every rope type of transformers 5
(``modeling_rope_utils.py``) is a rescaling of RoPE's spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
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
    position_interpolation,
    rescaled,
    yarn,
)
from trainer.positional.spectrum import Frequencies, Spectrum

ROPE_TYPES = "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"
KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
    *("partial_rotary_factor", "finetuned"),
}
STILL = 1e-20
"""Radians per token below which a pair does not turn in any sequence."""
STANDSTILL = 1e30
"""Factor that divides the frequency of a pair that does not rotate."""
PRECISION = 1e-8
"""Relative; transformers computes frequencies in float32, to 1e-7."""

Parameters = dict[str, Any]


def spectrum_from_rope_parameters(
    values: Mapping[str, Any], head_dim: int, training_length: int
) -> Spectrum:
    """Return the spectrum that transformers computes from these parameters.

    ``values``: ``rope_type``, ``rope_theta`` and the keys of the type.
    ``original_max_position_embeddings``, the length before the extension, defaults to
    ``training_length``, which is ``max_position_embeddings``. ``head_dim`` is even.

    Raises:
        UserError: the type or a key is unknown.
        KeyError: a key is missing.
    """
    rope = {key: value for key, value in values.items() if value is not None}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UserError(f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    if unknown := rope.keys() - KEYS:
        raise UserError(f"rope_parameters: unknown keys {', '.join(sorted(unknown))}")
    original = rope.get("original_max_position_embeddings", training_length)
    share, pairs = rope.get("partial_rotary_factor", 1.0), head_dim // 2
    plain = Spectrum(geometric(rope["rope_theta"], int(head_dim * share) // 2))
    if kind == "default":
        return plain
    if kind == "linear":
        return rescaled(plain, position_interpolation, original, rope["factor"])
    if kind == "dynamic":
        return dynamic(plain, ntk_aware, training_length, growth=rope["factor"])
    if kind == "proportional":  # of all pairs, the fastest rotate
        all_pairs = geometric(rope["rope_theta"], pairs)
        rotating = int(share * pairs)
        plain = Spectrum(all_pairs[:rotating] + (0.0,) * (pairs - rotating))
        return rescaled(plain, position_interpolation, original, rope.get("factor", 1.0))
    if kind == "longrope":
        scaled = longrope(plain, rope["short_factor"], rope["long_factor"], original)
        factor = max(rope.get("factor", training_length / original), 1.0)
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)))
        spectrum = replace(scaled, rotary_scale=scale)
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        method = partial(llama3, low_freq_factor=low, high_freq_factor=high)
        spectrum = rescaled(plain, method, original, rope["factor"])
    else:
        ramp = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
        spectrum = rescaled(plain, partial(yarn, **ramp), original, rope["factor"])
        spectrum = replace(spectrum, rotary_scale=_yarn_scale(rope))
    # Files divide frequencies by a huge factor if their type cannot express 0.
    return replace(spectrum, inv_freq=tuple(f if f > STILL else 0.0 for f in spectrum.inv_freq))


def _yarn_scale(rope: Parameters) -> float:
    """Return YaRN's attention factor: 0.1 ln s + 1, or a quotient of two such numbers."""

    def scale(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(max(rope["factor"], 1.0)) + 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    inferred = scale(above) / scale(below) if above and below else scale(1.0)
    return rope.get("attention_factor", inferred)


def rope_parameters(spectrum: Spectrum, head_dim: int, training_length: int) -> Parameters | None:
    """Return parameters with which transformers rotates all pairs of a head like this spectrum.

    Prefers the most specific type that fits: ``default``, ``linear``, ``dynamic``,
    ``proportional``, ``llama3``, ``yarn``; otherwise ``longrope``, which can express any
    frequencies; None if no type fits. ``yarn`` and ``longrope`` also express the scale of rotated
    channels. The caller handles the rest of that scale and the temperature. Pairs that the spectrum
    lacks, at the end of the head, do not rotate.
    """
    for candidate in _candidates(spectrum, head_dim, training_length):
        with suppress(ValueError, ZeroDivisionError):  # a candidate may be out of bounds
            read_back = spectrum_from_rope_parameters(candidate, head_dim, training_length)
            if rotate_alike(read_back, spectrum, head_dim, training_length):
                return candidate
    return None


def _whole_head(inv_freq: Frequencies, pairs: int) -> Frequencies:
    """Pad ``inv_freq`` with zeros to ``pairs`` entries."""
    return inv_freq + (0.0,) * (pairs - len(inv_freq))


def rotate_alike(a: Spectrum, b: Spectrum, head_dim: int, training_length: int) -> bool:
    """Whether two spectra rotate a head by the same frequencies at every length; scales may differ
    by a constant."""
    pairs = head_dim // 2
    lengths = {s.long.length for s in (a, b) if s.long is not None} | {training_length}
    for n in {1, *(n for length in lengths for n in (length, length + 1, 3 * length))}:
        x, y = (s.at(n, training_length) for s in (a, b))
        grown = x.rotary_scale - a.rotary_scale, y.rotary_scale - b.rotary_scale
        both = zip(_whole_head(x.inv_freq, pairs), _whole_head(y.inv_freq, pairs), strict=True)
        if not all(math.isclose(f, g, rel_tol=PRECISION, abs_tol=1e-12) for f, g in (grown, *both)):
            return False
    return True


def _candidates(spectrum: Spectrum, head_dim: int, training_length: int) -> Iterator[Parameters]:
    """Yield every candidate worth a comparison."""
    pairs = head_dim // 2
    moving = [f for f in spectrum.inv_freq if f > 0]
    if not moving:
        from trainer.hf import NO_ROTATION  # imports transformers

        yield {"rope_theta": 10_000.0} | NO_ROTATION
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
        both = zip(geometric(theta, pairs), _whole_head(inv_freq, pairs), strict=True)
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
