"""What is wrong with the key of a word such as ``optimizer.lr=1e-3``."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.types import Override

from trainer.common.errors import Problem, did_you_mean, nearest

FREE_FORM = (
    "positional.encodings",
    "positional.heads",
    "controls",
    "phases",
    "callbacks",
    "data.mixture",
    "data.arguments",
)
"""Groups whose keys the user chooses; new ones are added with a plus."""

CLOSE = 0.69
"""From which likeness on a key is what may be meant, in whatever group; of less, one of the same
group may be."""
MOST = 3
"""Groups that have a key of one name; where more do, none is likely to be meant."""


def _below(key: str, tree: dict[str, Any]) -> Iterator[str]:
    """Where a key stands in the groups of a tree, at any depth."""
    for name, below in tree.items():
        if isinstance(below, dict) and name != "hydra":
            found = [key] if key in below else _below(key, below)
            yield from (f"{name}.{one}" for one in found)


def _names(tree: dict[str, Any]) -> Iterator[str]:
    """All keys of a tree, at any depth."""
    for name, below in tree.items():
        if name != "hydra":
            yield str(name)
            yield from _names(below) if isinstance(below, dict) else ()


def _nearest(key: str, where: str, place: dict[str, Any], base: dict[str, Any]) -> str:
    """What may be meant by a key that ``place`` does not have: one that is written much like it
    there, of that name elsewhere, or much like it elsewhere; or else all that there are."""
    here = [str(name) for name in place if name != "hydra"]
    if not get_close_matches(key, here, 1, CLOSE):
        for word in get_close_matches(key, [*_names(base)], 1, CLOSE):
            below = [f"{where}.{one}" if where else one for one in _below(word, place)]
            found = below or [*([word] if word in base else ()), *_below(word, base)]
            if len(found) <= MOST:
                return f"Did you mean {' or '.join(found)}?"
    return did_you_mean(key, here)


def key_problem(override: Override, base: Any) -> Problem | None:
    """What is wrong with the key of ``a.b.c=value``: it must exist, or lie in a free-form group."""
    place = base
    path = override.key_or_group.split(".")
    for depth, key in enumerate(path):
        if not isinstance(place, dict):
            group, rest = ".".join(path[:depth]), ".".join(path[depth:])
            said = str(override.input_line).partition("=")[2]
            whole = f"null; write '{group}={{{rest}: {said}}}'"
            return Problem(
                f"{group}.{rest}",
                f"{group} is {whole if place is None else 'a value, not a group'}.",
            )
        if key not in place:
            where = ".".join(path[:depth])
            free = where in FREE_FORM or where.startswith(tuple(f"{f}." for f in FREE_FORM))
            # Names that users choose are often those of other groups and keys.
            near = did_you_mean(key, place) if free else _nearest(key, where, place, base)
            if free and (override.is_add() or override.is_force_add()):
                return None
            if free and nearest(key, map(str, place)) is None:
                return Problem(".".join(path), f"not set yet; write +{override.input_line}")
            prefix = f"{where}." if where else ""
            return Problem(f"{prefix}{key}", "unknown key.", near)
        place = place[key]
    both = isinstance(place, dict) and isinstance(override.value(), dict)  # which are merged
    word = str(override.input_line).lstrip("+")
    twice = Problem(".".join(path), f"it has a value already; write {word} without the plus.")
    return twice if override.is_add() and not both else None
