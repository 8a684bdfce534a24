"""Keys and values of needles: ``adjective-noun`` and numbers, as in RULER (Hsieh et al. 2024).

The words are from wonderwords' lists; draws depend only on the caller's generator.
"""

from __future__ import annotations

import re
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
