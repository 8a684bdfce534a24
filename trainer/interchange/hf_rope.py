"""Spectrum from the ``rope_parameters`` of a Hugging Face config.json, and the reverse.

Older files call the parameters ``rope_scaling``. Every rope type of transformers 5
(``modeling_rope_utils.py``) is a rescaling of RoPE's spectrum.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.common.errors import UserError
from trainer.positional import rescaling
from trainer.positional.encodings import geometric, p_rope
from trainer.positional.encodings import rope as plain_rope
from trainer.positional.spectrum import Frequencies, Spectrum, Step

ROPE_TYPES = "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"
KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
    *("partial_rotary_factor", "finetuned"),
}
STILL = 1e-20
"""Radians per token below which a pair does not turn in any sequence."""
STILL_FACTOR = 1e30
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
    unknown = rope.keys() - KEYS
    if unknown:
        raise UserError(f"rope_parameters: unknown keys {', '.join(sorted(unknown))}")
    original = rope.get("original_max_position_embeddings", training_length)
    pairs = head_dim // 2
    share = rope.get("partial_rotary_factor", 1.0)
    fraction = int(head_dim * share) // 2 / pairs
    plain = plain_rope(head_dim, base=rope["rope_theta"], rotary_fraction=fraction)
    if kind == "default":
        return plain
    if kind == "dynamic":
        return rescaling.dynamic(plain, rescaling.ntk_aware, training_length, growth=rope["factor"])
    if kind == "proportional":  # of all pairs, the fastest rotate
        plain = p_rope(head_dim, base=rope["rope_theta"], p=int(share * pairs) / pairs)
        rope = {"factor": 1.0} | rope
    if kind in ("linear", "proportional"):
        return rescaling.rescaled(plain, rescaling.position_interpolation, original, rope["factor"])
    if kind == "longrope":
        scaled = rescaling.longrope(plain, rope["short_factor"], rope["long_factor"], original)
        factor = max(rope.get("factor", training_length / original), 1.0)
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)))
        spectrum = replace(scaled, rotary_scale=scale)
    elif kind == "llama3":
        ends = {key: rope[key] for key in ("low_freq_factor", "high_freq_factor")}
        method = partial(rescaling.llama3, **ends)
        spectrum = rescaling.rescaled(plain, method, original, rope["factor"])
    else:
        ramp = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
        method = partial(rescaling.yarn, **ramp)
        spectrum = rescaling.rescaled(plain, method, original, rope["factor"])
        spectrum = replace(spectrum, rotary_scale=_yarn_scale(rope))
    # Files divide frequencies by a huge factor if their type cannot express 0.
    inv_freq = tuple(f if f > STILL else 0.0 for f in spectrum.inv_freq)
    return replace(spectrum, inv_freq=inv_freq, origin=spectrum.origin if any(inv_freq) else ())


def _yarn_scale(rope: Parameters) -> float:
    """Return YaRN's attention factor: 0.1 ln s + 1, or a quotient of two such numbers."""

    def scale(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(max(rope["factor"], 1.0)) + 1.0

    if "attention_factor" in rope:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def rope_forms(spectrum: Spectrum, head_dim: int, training_length: int) -> list[Parameters]:
    """Return parameters with which transformers may rotate all pairs of a head like this spectrum.

    First come those of its origin, or plain RoPE if that is unknown, then ``longrope``, which can
    express any two sets of frequencies. The caller compares them with the spectrum, and handles its
    temperature and those scales of rotated channels that a type lacks. Pairs that the spectrum
    lacks, at the end of the head, do not rotate.
    """
    pairs = head_dim // 2
    if not spectrum.rotates:
        from trainer.hf import NO_ROTATION  # imports transformers

        return [{"rope_theta": 10_000.0} | NO_ROTATION]
    form = None
    if spectrum.origin:
        form = _form_of_origin(spectrum, pairs)
    elif len(spectrum.inv_freq) > 1 and spectrum.inv_freq[1] > 0:  # a checkpoint of 0.3.0
        base = float(f"{spectrum.inv_freq[1] ** -pairs:.10g}")
        form = {"rope_type": "default", "rope_theta": base}
    forms = [] if form is None else [form]
    if spectrum.long is None or spectrum.long.stretch is None:
        forms.append(_any_frequencies(spectrum, pairs, training_length))
    return forms


def _form_of_origin(spectrum: Spectrum, pairs: int) -> Parameters | None:
    """Return the parameters that an origin amounts to; None if no type of transformers does."""
    encoding, *steps = spectrum.origin
    count = len(spectrum.inv_freq)
    moving = sum(f > 0 for f in spectrum.inv_freq)
    base, factor = _geometry(encoding, count)
    while steps and steps[0].name in ("position_interpolation", "ntk_aware", "rebased"):
        step = steps.pop(0)
        if step.name == "position_interpolation":
            factor *= step.parameters["factor"]
        elif step.name == "ntk_aware":
            base *= step.parameters["factor"] ** (count / max(count - 1, 1))
        else:
            base = step.parameters["base"]
    form: Parameters = {"rope_type": "default", "rope_theta": base ** (pairs / count)}
    if steps:
        is_plain = len(steps) == 1 and moving == pairs and factor == 1
        return _form_of_step(steps[0], form, spectrum) if is_plain else None
    if moving < pairs:
        share = moving / pairs
        if int(share * pairs) != moving:  # int() truncates 28.999... to 28
            share = (moving + 0.5) / pairs
        form |= {"rope_type": "proportional", "partial_rotary_factor": share}
    elif factor != 1:
        form["rope_type"] = "linear"
    return form if factor == 1 else form | {"factor": factor}


def _geometry(encoding: Step, pairs: int) -> tuple[float, float]:
    """Return (base, d) if pair m of an encoding's ``pairs`` turns by base^(-m / pairs) / d a token,
    or not at all; any numbers for an encoding that is not like this."""
    values = {"training_length": 1} | encoding.parameters
    if "base" in values:
        base = values["base"] or values["training_length"] / (2 * math.pi)
        return base, 1 / values.get("angle_scale", 1.0)
    fastest = values.get("fastest_wavelength", 2 * math.pi)
    slowest = values.get("slowest_wavelength", values["training_length"])
    slowest = slowest or values["training_length"] / 2
    return (slowest / fastest) ** (pairs / max(pairs - 1, 1)), fastest / (2 * math.pi)


def _form_of_step(step: Step, form: Parameters, spectrum: Spectrum) -> Parameters | None:
    """Return the parameters of plain RoPE, ``form``, after a rescaling; None if it has no type."""
    values = dict(step.parameters)
    if step.name == "dynamic" and values["method"] == "ntk_aware":
        return form | {"rope_type": "dynamic", "factor": values["growth"]}
    values["original_max_position_embeddings"] = values.pop("training_length", None)
    if step.name in ("llama3", "ntk_by_parts_turns", "yarn_turns"):
        ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0 if step.name == "llama3" else 32.0}
        return form | {"rope_type": "llama3"} | ends | values
    if step.name not in ("yarn", "ntk_by_parts"):
        return None
    form = form | {"rope_type": "yarn", "truncate": True} | values
    attention = spectrum.rotary_scale * math.sqrt(spectrum.temperature.scale)
    # Omit YaRN's default: not every engine reads the key.
    if not math.isclose(attention, 0.1 * math.log(values["factor"]) + 1, rel_tol=1e-9):
        form["attention_factor"] = attention
    return form


def _whole_head(inv_freq: Frequencies, pairs: int) -> Frequencies:
    """Pad ``inv_freq`` with zeros to ``pairs`` entries."""
    return inv_freq + (0.0,) * (pairs - len(inv_freq))


def rotate_alike(a: Spectrum, b: Spectrum, head_dim: int, training_length: int) -> bool:
    """Whether two spectra rotate a head alike at every length; scales may differ by a constant."""
    pairs = head_dim // 2
    lengths = {1}
    for end in {training_length} | {s.long.length for s in (a, b) if s.long is not None}:
        lengths |= {end, end + 1, 3 * end}
    for n in lengths:
        x, y = (s.at(n, training_length) for s in (a, b))
        heads = _whole_head(x.inv_freq, pairs), _whole_head(y.inv_freq, pairs)
        growth = x.rotary_scale - a.rotary_scale, y.rotary_scale - b.rotary_scale
        compared = [*zip(*heads, strict=True), growth]
        if not all(math.isclose(f, g, rel_tol=PRECISION, abs_tol=1e-12) for f, g in compared):
            return False
    return True


def _any_frequencies(spectrum: Spectrum, pairs: int, length: int) -> Parameters:
    """Return LongRoPE parameters with a factor for every pair."""
    theta = 10_000.0
    original = length
    long_freq = spectrum.inv_freq
    if spectrum.long is not None:
        original = spectrum.long.length
        long_freq = spectrum.long.inv_freq

    def factors(inv_freq: Frequencies) -> list[float]:
        both = zip(geometric(theta, pairs), _whole_head(inv_freq, pairs), strict=True)
        return [g / f if f else STILL_FACTOR for g, f in both]

    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": max(length / original, 1.0),
        "short_factor": factors(spectrum.inv_freq),
        "long_factor": factors(long_freq),
        "original_max_position_embeddings": original,
        "attention_factor": spectrum.rotary_scale,
    }
