"""The ``rope_parameters`` of a Hugging Face config.json that stand for a spectrum; the inverse of
:mod:`trainer.interchange.hf_rope`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from trainer.common.errors import UserError
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.positional.encodings import geometric
from trainer.positional.spectrum import LongFrequencies, Spectrum

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


def rope_parameters(spectrum: Spectrum, head_dim: int, training_length: int) -> Parameters | None:
    """Parameters with which transformers turns the pairs of a whole head like this spectrum's.

    The most telling type that fits: ``default``, ``linear``, ``dynamic``, ``proportional``,
    ``llama3``, ``yarn``; else ``longrope``, which can hold any frequencies. Its ``yarn`` and
    ``longrope`` also carry the size of rotated channels; what they do not carry of it, and the
    temperature, is left to the caller.

    Args:
        spectrum: what to express. Pairs that it does not have stand still, at the end.
        head_dim: channels a head, even.
        training_length: C in tokens.

    Returns:
        None where no type fits.
    """
    for candidate in _candidates(spectrum, head_dim, training_length):
        with suppress(UserError):  # a guess may be out of all bounds
            read_back = spectrum_from_rope_parameters(candidate, head_dim, training_length)
            if _rotate_alike(read_back, spectrum, head_dim // 2):
                return candidate
    return None


def whole_head(inv_freq: Frequencies, pairs: int) -> Frequencies:
    """``inv_freq`` with zeros for the pairs up to ``pairs`` that it lacks."""
    return inv_freq + (0.0,) * (pairs - len(inv_freq))


def _rotate_alike(read_back: Spectrum, wanted: Spectrum, pairs: int) -> bool:
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
        and _stretches_alike(theirs, ours)
    )


def _stretches_alike(held: LongFrequencies, wanted: LongFrequencies) -> bool:
    if held.stretch is None or wanted.stretch is None:
        return held.stretch is wanted.stretch
    return held.stretch == wanted.stretch and math.isclose(held.growth, wanted.growth)


def _candidates(spectrum: Spectrum, head_dim: int, training_length: int) -> Iterator[Parameters]:
    """Every guess worth a comparison."""
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
    # transformers rounds down, and 29 / 50 * 50 to 28.
    exact = int(len(moving) / pairs * pairs) == len(moving)
    share = {"partial_rotary_factor": (len(moving) if exact else len(moving) + 0.5) / pairs}
    yield default | {"rope_type": "proportional"} | share
    yield default | {"rope_type": "proportional", "factor": factor} | share
    if len(moving) == pairs:
        # Outside of the ramps of YaRN and Llama 3 neighbours differ by the step of plain RoPE.
        steps = (_short((a / b) ** pairs) for a, b in pairwise(moving))
        for base in dict.fromkeys(steps):
            if base > 1:
                yield from _ramps(spectrum, base, training_length)
    yield _longrope(spectrum, pairs, training_length)


def _ramps(spectrum: Spectrum, theta: float, length: int) -> Iterator[Parameters]:
    """Types that divide slow pairs by a factor, fast ones by none, and those between by less."""
    plain = geometric(theta, len(spectrum.inv_freq))
    shares = [f / g for f, g in zip(spectrum.inv_freq, plain, strict=True)]
    factor = _short(1 / shares[-1])
    if not factor > 1:
        return
    common = {"rope_theta": theta, "factor": factor}
    kept = [(share - 1 / factor) / (1 - 1 / factor) for share in shares]
    between = [(f, k) for f, k in zip(plain, kept, strict=True) if 1e-6 < k < 1 - 1e-6]
    if len(between) > 1:
        # The kept share is linear in the frequency: 0 where a pair turns once, 1 at the fast end.
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
    # Left out where it is YaRN's own: not every engine reads the key.
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


def _longrope(spectrum: Spectrum, pairs: int, length: int) -> Parameters:
    """A factor for every pair."""
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
    """The shortest decimal number that differs by no more than rounding: 10000 for 9999.999999."""
    digits = (float(f"{value:.{n}g}") for n in range(1, 17))
    return next((d for d in digits if math.isclose(d, value, rel_tol=1e-11)), value)
