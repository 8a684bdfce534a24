"""A question as text, whose haystack can have any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""One line of a haystack that says nothing."""


@dataclass(frozen=True)
class Question:
    """``depth``: where in its haystack the answer begins, 0 to 1, if it is in one place."""

    text: str
    answers: tuple[str, ...]
    depth: float | None = None


class Kind(Protocol):
    """What one of RULER's tasks asks."""

    @property
    def new_tokens(self) -> int:
        """How many tokens a model may answer with."""
        ...

    @property
    def least(self) -> int:
        """The fewest of the units that the haystack is counted in."""
        ...

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """The trial with a haystack of ``units``, for a prompt of about ``length`` tokens."""
        ...


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """``count`` different draws."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
