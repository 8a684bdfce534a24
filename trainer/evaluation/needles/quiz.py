"""Needles hidden in a haystack, and the question at its end.

The sentences are those of DroPE, App. C.2, which are RULER's without introduction and chat
template. A question ends so that the answer continues the text, which suits models that were never
taught to answer. As in RULER (Hsieh et al. 2024), keys are ``adjective-noun`` of wonderwords' lists
and values numbers; draws depend only on the caller's generator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
import wonderwords


@lru_cache
def words(kind: str) -> tuple[str, ...]:
    """Return a list's plain lower-case words (``adjective``, ``noun``), without profanity."""
    listed, profane = (
        (resources.files(wonderwords) / "assets" / f"{name}list.txt")
        .read_text("utf-8")
        .splitlines()
        for name in (kind, "profanity")
    )
    plain = {word for word in listed if re.fullmatch(r"[a-z]+", word)}
    return tuple(sorted(plain - set(profane)))


def draw_keys(count: int, random: np.random.Generator) -> list[str]:
    """Draw distinct keys ``adjective-noun``."""
    adjectives, nouns = words("adjective"), words("noun")
    chosen = random.choice(len(adjectives) * len(nouns), size=count, replace=False, shuffle=True)
    pairs = (divmod(int(number), len(nouns)) for number in chosen)
    return [f"{adjectives[a]}-{nouns[n]}" for a, n in pairs]


def draw_values(count: int, digits: int, taken: str, random: np.random.Generator) -> list[str]:
    """Draw distinct numbers of ``digits`` digits that do not occur in the text ``taken``."""
    found: list[str] = []
    while len(found) < count:
        value = str(random.integers(10 ** (digits - 1), 10**digits))
        if value not in taken and value not in found:
            found.append(value)
    return found


DIGITS = 7
TOKENS_PER_VALUE = 16
"""Room in an answer. Seven digits and a space are 8 tokens at a token a byte, the most there can
be; the rest is for words between them."""


@dataclass(frozen=True)
class Quiz:
    """``needles``: sentences to hide. ``question``: end of the prompt. ``answers``: the right ones.
    ``asked``: indices of the needles that contain them."""

    needles: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    asked: tuple[int, ...]


DrawQuiz = Callable[[int, str, np.random.Generator], Quiz]
"""A quiz of so many needles, whose values are not in the text given."""


def needle(key: str, value: str) -> str:
    """Return the sentence that states a value."""
    return f"One of the special magic numbers for {key} is: {value}."


def one_of_many(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several keys, one of them queried; with one needle, the standard quiz."""
    keys, values = draw_keys(count, random), draw_values(count, DIGITS, taken, random)
    asked = int(random.integers(count))
    question = f"The special magic number for {keys[asked]} mentioned in the provided text is:"
    needles = tuple(map(needle, keys, values))
    return Quiz(needles, question, (values[asked],), (asked,))


def all_keys(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several keys, all of them queried."""
    keys, values = draw_keys(count, random), draw_values(count, DIGITS, taken, random)
    question = f"The special magic numbers for {listed(keys)} mentioned in the provided text are:"
    return Quiz(tuple(map(needle, keys, values)), question, tuple(values), tuple(range(count)))


def all_values(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several values of one key, all of them queried."""
    (key,), values = draw_keys(1, random), draw_values(count, DIGITS, taken, random)
    question = (
        f"What are all the special magic numbers for {key} mentioned in the provided text? "
        f"The special magic numbers for {key} mentioned in the provided text are:"
    )
    needles = tuple(needle(key, value) for value in values)
    return Quiz(needles, question, tuple(values), tuple(range(count)))


def listed(items: list[str]) -> str:
    """Format ``a``, ``a and b``, ``a, b, and c``."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + f", and {items[-1]}"
