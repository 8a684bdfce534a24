"""A positional encoding as data: which channel pairs of a head rotate, how fast, and how the
softmax is tempered with length.

Everything a method does to a head is a value here. Training encodings write a spectrum, context
extension rescales one, a drop replaces it with the empty one; the decoder only reads it. C, the
training length in tokens, belongs to the whole model: :class:`~trainer.positional.layout.Layout`
holds it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

MOST_COEFFICIENT, MOST_EXPONENT, MOST_SCALE = 100, 10, 1000
"""Of a temperature: with these the logits of any length are numbers still."""
MOST_FREQUENCY = 1e6
"""Radians per token; the angles of larger ones leave the numbers that kernels have."""
Frequencies = tuple[float, ...]
"""Radians per token, a number for every pair."""


@dataclass(frozen=True)
class Temperature:
    """Factor on the attention logits at length n: ``scale * (1 + coefficient * ln s) ** exponent``.

    s = max(n, C) / C with C the training length, so inside the training length the factor is
    ``scale``. DroPE (App. C.2) has exponent 1 and a fitted coefficient; RoPE-ID (App. A.4) 0.1 and
    2, and its C stays the one that it began with (App. A.9) as its ``reference``; YaRN has a
    constant ``scale`` for a given extension. ``per`` says whether n is the length of
    the sequence or, for every query, the number of keys it can see.
    ``reference``: tokens in place of C, so that a model is also trained with the factor; 1 for the
    logarithm of the length (scalable softmax, Nakanishi 2025). ``steps``: s = 1 + floor(n /
    reference), as Llama 4 has it.
    """

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
        below = self.reference is not None and self.reference < training_length
        return not self.is_constant and (below or self.steps)

    @property
    def follows_length(self) -> bool:
        """Whether the factor depends on the length of the sequence."""
        return self.per == "sequence" and not self.is_constant

    def at(self, length: int, training_length: int) -> Temperature:
        """The temperature for a sequence of ``length`` tokens: a constant one, but for ``query``,
        which is the same in all sequences."""
        if not self.follows_length:
            return self
        reference = self.reference or training_length
        grown = 1 + length // reference
        stretch = grown if self.steps else max(length, reference) / reference
        factor = self.scale * (1 + self.coefficient * math.log(stretch)) ** self.exponent
        return Temperature(scale=factor)


@dataclass(frozen=True)
class Stretch:
    """How an extension by a factor s slows the pairs of a head.

    Frequency f_m becomes f_m (``kept[m]`` + (1 - ``kept[m]``) s^-``power[m]``), and the rotated
    channels are multiplied by 1 + ``attention`` ln s. All are the identity at s = 1.
    """

    kept: Frequencies
    power: Frequencies
    attention: float = 0.0

    def frequencies(self, inv_freq: Frequencies, factor: float) -> Frequencies:
        """``inv_freq`` slowed for an extension by ``factor``."""
        return tuple(
            f * (kept + (1 - kept) * factor**-power)
            for f, kept, power in zip(inv_freq, self.kept, self.power, strict=True)
        )

    def scale(self, factor: float, before: float = 1.0) -> float:
        """Return the factor on rotated channels after an extension by ``factor``.

        ``before``: the factor they have already. The logarithms of two extensions add up, so that
        YaRN by s and then by t gives 1 + 0.1 ln(s t), its factor for both together.
        """
        return before + self.attention * math.log(factor)


@dataclass(frozen=True)
class LongFrequencies:
    """Frequencies in sequences of n > ``length`` tokens, where they differ.

    They are ``inv_freq`` (LongRoPE), slowed by ``stretch`` with s = 1 + ``growth`` (n / C - 1)
    where n > C (dynamic NTK and its like); None: the same in all sequences of more than ``length``.
    ``reference``: the C of s, which a later phase with longer sequences does not change; None, in
    layouts that earlier versions stored: the training length.
    """

    length: int
    inv_freq: Frequencies
    stretch: Stretch | None = None
    growth: float = 1.0
    reference: int | None = None


@dataclass(frozen=True)
class Spectrum:
    """The encoding of one head.

    ``inv_freq``: angular frequencies in radians per token of the rotated pairs. Pair m is made of
    channels m and m + len(inv_freq) (the rotate-half layout of Hugging Face); channels from
    ``rotary_dim`` on carry no position. Empty: no rotation (NoPE).
    ``alibi``: a bias linear in the distance on the scores, the one encoding that is no rotation.
    ``rotary_scale``: factor on the rotated channels of queries and keys (YaRN's and LongRoPE's
    attention factor in Hugging Face models); the other channels keep their size.
    ``long``: other frequencies for long sequences; None, the usual case: the same at any length.
    """

    inv_freq: Frequencies = ()
    temperature: Temperature = Temperature()
    alibi: bool = False
    rotary_scale: float = 1.0
    long: LongFrequencies | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels."""
        return 2 * len(self.inv_freq)

    @property
    def rotates(self) -> bool:
        """Whether there is any rotation to compute."""
        return any(self.inv_freq)

    @property
    def wavelengths(self) -> tuple[float, ...]:
        """Tokens per full turn of every pair (infinite for a pair that stands still)."""
        return tuple(2 * math.pi / f if f else math.inf for f in self.inv_freq)

    @property
    def follows_length(self) -> bool:
        """Whether anything depends on the length of the sequence."""
        return self.long is not None or self.temperature.follows_length

    def at(self, length: int, training_length: int) -> Spectrum:
        """The spectrum for a sequence of ``length`` tokens, which follows no length."""
        if not self.follows_length:
            return self
        temperature = self.temperature.at(length, training_length)
        plain = replace(self, temperature=temperature, long=None)
        long = self.long
        if long is None or length <= long.length:
            return plain
        if long.stretch is None:
            return replace(plain, inv_freq=long.inv_freq)
        s = 1 + long.growth * (max(length / (long.reference or training_length), 1) - 1)
        return replace(
            plain,
            inv_freq=long.stretch.frequencies(long.inv_freq, s),
            rotary_scale=long.stretch.scale(s, self.rotary_scale),
        )

    def with_temperature(self, **changes: Any) -> Spectrum:
        """This spectrum with some fields of its temperature replaced."""
        return replace(self, temperature=replace(self.temperature, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Spectrum:
        """The inverse of :meth:`to_dict`, also of what JSON made of it."""
        long = values["long"]
        if long is not None:
            stretch = long["stretch"]
            if stretch is not None:
                kept, power = tuple(stretch["kept"]), tuple(stretch["power"])
                stretch = Stretch(kept, power, stretch["attention"])
            inv_freq = tuple(long["inv_freq"])
            long = LongFrequencies(**long | {"inv_freq": inv_freq, "stretch": stretch})
        temperature = Temperature(**values["temperature"])
        inv_freq = tuple(values["inv_freq"])
        changed = {"inv_freq": inv_freq, "temperature": temperature, "long": long}
        return cls(**values | changed)
