"""Positional encoding of a head as data: frequencies of its channel pairs, and its temperature.

Training encodings create a spectrum, context extension rescales it, a drop replaces it with the
empty one; the decoder only reads it. C, the training length in tokens, belongs to the whole model:
:class:`~trainer.positional.layout.Layout` holds it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Frequencies = tuple[float, ...]
"""Radians per token, one number per pair."""
READ = {"extra": "forbid", "allow_inf_nan": False}
"""How pydantic reads stored values: without unknown keys and infinite numbers."""


def cope_shares(pairs: int, clipped: int) -> Frequencies:
    """Return the shares of their frequencies that CoPE's ``pairs`` keep (arXiv 2602.05258).

    The ``clipped`` last pairs, the slowest ones, keep (1 + cos t) / 2 with t evenly spaced from 0
    to pi, so that the slowest does not rotate, also if it is the only one, which the published code
    would keep; the others keep everything. Raises a ValueError if ``clipped`` is negative.
    """
    if clipped < 0:
        raise ValueError(f"clipped: expected 0 or more pairs, got {clipped}")
    count = min(clipped, pairs)
    ramp = (0.5 * (1 + math.cos(math.pi * m / (count - 1))) for m in range(count - 1))
    return (1.0,) * (pairs - count) + tuple(ramp) + (0.0,) * min(count, 1)


@dataclass(frozen=True)
class Temperature:
    """Factor on the attention logits at length n: ``scale * (1 + coefficient * ln s) ** exponent``.

    s = max(n, C) / C with C the training length, so inside the training length the factor is
    ``scale`` (with ``steps`` below C). ``per``: whether n is the length of the sequence or, for
    every query, the number of keys it can see. ``reference``: tokens in place of C, so that a model
    is also trained with the factor; 1 for the logarithm of the length (scalable softmax, Nakanishi
    2025). ``steps``: s = 1 + floor(n / reference), as in Llama 4.
    """

    __pydantic_config__ = READ
    coefficient: float = 0.0
    exponent: float = 1.0
    scale: float = 1.0
    per: Literal["sequence", "query"] = "sequence"
    reference: int | None = None
    steps: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether the factor does not depend on any length."""
        return self.coefficient == 0.0

    @property
    def is_none(self) -> bool:
        """Whether the factor is 1 at every length."""
        return self.is_constant and self.scale == 1

    def is_trained(self, training_length: int) -> bool:
        """Whether the factor depends on lengths within the training length too."""
        reference = self.reference or training_length
        first = reference if self.steps else reference + 1
        return not self.is_constant and first <= training_length

    def at(self, length: int, training_length: int) -> "Temperature":
        """Return the temperature for a sequence of ``length`` tokens.

        It is constant, except for ``per="query"``, which is the same in all sequences.
        """
        if self.per == "query" or self.is_constant:
            return self
        reference = self.reference or training_length
        stretch = 1 + length // reference if self.steps else max(length, reference) / reference
        factor = self.scale * (1 + self.coefficient * math.log(stretch)) ** self.exponent
        return Temperature(scale=factor)


@dataclass(frozen=True)
class Stretch:
    """Slowing of a head's pairs by an extension with factor s.

    Frequency f_m becomes f_m (``kept[m]`` + (1 - ``kept[m]``) s^-``power[m]``), and the rotated
    channels are multiplied by 1 + ``attention`` ln s. Both are the identity at s = 1. Logarithms of
    two extensions add up: YaRN by s and then by t gives 1 + 0.1 ln(s t), its factor for both.
    """

    __pydantic_config__ = READ
    kept: Frequencies
    power: Frequencies
    attention: float = 0.0

    def frequencies(self, inv_freq: Frequencies, factor: float) -> Frequencies:
        """Return ``inv_freq`` slowed for an extension by ``factor``."""
        return tuple(
            f * (share + (1 - share) * factor**-power)
            for f, share, power in zip(inv_freq, self.kept, self.power, strict=True)
        )


@dataclass(frozen=True)
class LongFrequencies:
    """Frequencies in sequences of n > ``length`` tokens, if they differ.

    With ``stretch``, they are ``inv_freq`` slowed with s = 1 + ``growth`` (n / C - 1) where n > C
    (dynamic NTK and similar methods). Without, they are ``inv_freq`` in all sequences of more than
    ``length`` tokens (LongRoPE). ``reference``: the C of s, unchanged by a later phase with longer
    sequences.
    """

    __pydantic_config__ = READ
    length: int
    inv_freq: Frequencies
    stretch: Stretch | None = None
    growth: float = 1.0
    reference: int = 1


@dataclass(frozen=True)
class Step:
    """Encoding or rescaling by the name of its function, and its parameters."""

    __pydantic_config__ = READ
    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Spectrum:
    """Encoding of one head.

    ``inv_freq``: angular frequencies in radians per token of the rotated pairs. Pair m is made of
    channels m and m + len(inv_freq) (the rotate-half layout of Hugging Face); channels from
    ``rotary_dim`` on carry no position. Empty: no rotation (NoPE). ``alibi``: whether scores have a
    bias linear in the distance, the only encoding without rotation. ``rotary_scale``: factor on the
    rotated channels of queries and keys (YaRN's and LongRoPE's attention factor in Hugging Face
    models); the other channels keep their size. ``long``: frequencies for long sequences; None, the
    usual case: the same at any length. ``origin``: the encoding and the rescalings that gave these
    frequencies, in order; empty: unknown, or no rotation. Spectra with the same numbers are equal
    whatever their origin.
    """

    __pydantic_config__ = READ
    inv_freq: Frequencies = ()
    temperature: Temperature = Temperature()
    alibi: bool = False
    rotary_scale: float = 1.0
    long: LongFrequencies | None = None
    origin: tuple[Step, ...] = field(default=(), compare=False)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels."""
        return 2 * len(self.inv_freq)

    @property
    def rotates(self) -> bool:
        """Whether any pair has a nonzero frequency."""
        return any(self.inv_freq)

    @property
    def encoding(self) -> str:
        """Name of the encoding; RoPE if the origin is unknown."""
        if self.origin:
            return self.origin[0].name
        if self.rotates:
            return "rope"
        return "alibi" if self.alibi else "nope"

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies or the temperature depend on the length of the sequence."""
        is_tempered = self.temperature.per == "sequence" and not self.temperature.is_constant
        return self.long is not None or is_tempered

    def at(self, length: int, training_length: int) -> "Spectrum":
        """Return the spectrum for a sequence of ``length`` tokens, with fixed frequencies."""
        if not self.follows_length:
            return self
        temperature = self.temperature.at(length, training_length)
        plain = replace(self, temperature=temperature, long=None, origin=())
        long = self.long
        if long is None or length <= long.length:
            return plain
        if long.stretch is None:
            return replace(plain, inv_freq=long.inv_freq)
        s = 1 + long.growth * (max(length / long.reference, 1) - 1)
        return replace(
            plain,
            inv_freq=long.stretch.frequencies(long.inv_freq, s),
            rotary_scale=self.rotary_scale + long.stretch.attention * math.log(s),
        )

    def after(self, name: str, **parameters: Any) -> tuple[Step, ...]:
        """Return the origin after one more step; empty if it is unknown."""
        return (*self.origin, Step(name, parameters)) if self.origin else ()

    def with_temperature(self, **changes: Any) -> "Spectrum":
        """Return this spectrum with some fields of its temperature replaced."""
        return replace(self, temperature=replace(self.temperature, **changes))
