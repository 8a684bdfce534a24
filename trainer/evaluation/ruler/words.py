"""English words for keys and lists, from the wonderwords package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from random import Random


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
