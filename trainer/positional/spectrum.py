"""A positional encoding as data: which channel pairs of a head rotate, how fast, and how the
softmax is tempered with length.

Everything a method does to a head is a value here. Training encodings write a spectrum, context
extension rescales one, a drop replaces it with the empty one; the decoder only reads it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Temperature:
    """Factor on the attention logits at length n: ``scale * (1 + coefficient * ln s) ** exponent``.

    s = max(n, C) / C with C the training length, so inside the training length the factor is
    ``scale``. DroPE (App. C.2) has exponent 1 and a fitted coefficient; RoPE-ID (App. A.4) 0.1 and
    2; YaRN has a constant ``scale`` for a given extension. ``per`` says whether n is the length of
    the sequence or, for every query, the number of keys it can see.
    """

    coefficient: float = 0.0
    exponent: float = 1.0
    scale: float = 1.0
    per: Literal["sequence", "query"] = "sequence"

    def at(self, length: int, training_length: int) -> float:
        """The factor for a sequence of ``length`` tokens."""
        stretch = max(length, training_length) / training_length
        return self.scale * (1 + self.coefficient * math.log(stretch)) ** self.exponent

    @property
    def is_constant(self) -> bool:
        """Whether the factor does not depend on the length."""
        return self.coefficient == 0.0


@dataclass(frozen=True)
class Beyond:
    """Frequencies in sequences of n > ``length`` tokens, where they differ (LongRoPE, dynamic NTK).

    They are ``inv_freq``, changed by the method ``rescaling``, a key of
    :data:`trainer.positional.rescaling.RESCALINGS`, with s = 1 + ``growth`` (max(n, C) / C - 1).
    """

    length: int
    inv_freq: tuple[float, ...]
    growth: float = 0.0
    rescaling: str = "ntk"


@dataclass(frozen=True)
class Spectrum:
    """The encoding of one head.

    ``inv_freq``: angular frequencies in radians per token of the rotated pairs. Pair m is made of
    channels m and m + len(inv_freq) (the rotate-half layout of Hugging Face); channels from
    ``rotary_dim`` on carry no position. Empty: no rotation (NoPE).
    ``alibi``: a bias linear in the distance on the scores, the one encoding that is no rotation.
    ``rotary_scale``: factor on the rotated channels of queries and keys (YaRN's and LongRoPE's
    attention factor in Hugging Face models); the other channels keep their size.
    ``beyond``: other frequencies for long sequences; None, the usual case: the same at any length.
    ``training_length``: C, in tokens, the length at which every rescaling is the identity.
    """

    training_length: int
    inv_freq: tuple[float, ...] = ()
    temperature: Temperature = Temperature()
    alibi: bool = False
    rotary_scale: float = 1.0
    beyond: Beyond | None = None

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

    def with_temperature(self, **changes: Any) -> Spectrum:
        """This spectrum with some fields of its temperature replaced."""
        return replace(self, temperature=replace(self.temperature, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and checkpoints."""
        return asdict(self) | {"inv_freq": list(self.inv_freq)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Spectrum:
        """The inverse of :meth:`to_dict`."""
        beyond = values.get("beyond")
        return cls(
            **values
            | {
                "inv_freq": tuple(values["inv_freq"]),
                "temperature": Temperature(**values["temperature"]),
                "beyond": beyond and Beyond(**beyond | {"inv_freq": tuple(beyond["inv_freq"])}),
            }
        )
