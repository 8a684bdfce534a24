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
    """A question as text; ``depth``: position of the answer in its haystack, 0 to 1, if there is
    only one."""

    text: str
    answers: tuple[str, ...]
    depth: float | None = None


class Kind(Protocol):
    """One of RULER's tasks."""

    @property
    def new_tokens(self) -> int:
        """Largest number of tokens in an answer."""
        ...

    @property
    def least(self) -> int:
        """Smallest number of haystack units."""
        ...

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """Make a trial with a haystack of ``units``, for a prompt of about ``length`` tokens."""
        ...


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Return ``count`` distinct draws."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
