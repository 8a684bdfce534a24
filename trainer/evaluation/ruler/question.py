"""A question with a haystack of any size, and English words for its keys and lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
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


@cache
def _listed(name: str) -> tuple[str, ...]:
    text = (files("wonderwords") / "assets" / f"{name}list.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines())


@cache
def vocabulary() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*_listed("noun"), *_listed("adjective"), *_listed("verb")}))


def compound(rng: Random) -> str:
    """Return a hyphenated adjective and noun, one of six million."""
    return f"{rng.choice(_listed('adjective'))}-{rng.choice(_listed('noun'))}"
