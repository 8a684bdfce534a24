"""What is wrong with the key of a word such as ``optimizer.lr=1e-3``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import Override

from trainer.errors import did_you_mean

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


def _below(key: str, tree: dict[str, Any]) -> Iterator[str]:
    """Where a key stands in the groups of a tree, at any depth."""
    for name, below in tree.items():
        if isinstance(below, dict) and name != "hydra":
            found = [key] if key in below else _below(key, below)
            yield from (f"{name}.{one}" for one in found)


def key_problem(override: Override, base: Any) -> str | None:
    """What is wrong with the key of ``a.b.c=value``: it must exist, or lie in a free-form group."""
    place = base
    path = override.key_or_group.split(".")
    for depth, key in enumerate(path):
        if not isinstance(place, dict):
            group, rest = ".".join(path[:depth]), ".".join(path[depth:])
            said = str(override.input_line).partition("=")[2]
            whole = f"null; write '{group}={{{rest}: {said}}}'"
            return (
                f"{group}.{rest}: {group} is {whole if place is None else 'a value, not a group'}."
            )
        if key not in place:
            where = ".".join(path[:depth])
            near = did_you_mean(key, [str(k) for k in place if k != "hydra"])
            free = where in FREE_FORM or where.startswith(tuple(f"{f}." for f in FREE_FORM))
            if free and (override.is_add() or override.is_force_add()):
                return None
            if free and "mean" not in near:
                return f"{'.'.join(path)}: not set yet; write +{override.input_line}"
            prefix = f"{where}." if where else ""
            if "mean" not in near and (deeper := list(_below(key, place))):
                near = f" Did you mean {' or '.join(f'{prefix}{one}' for one in deeper)}?"
            return f"{prefix}{key}: unknown key.{near}"
        place = place[key]
    both = isinstance(place, dict) and isinstance(override.value(), dict)  # which are merged
    word = str(override.input_line).lstrip("+")
    twice = f"{'.'.join(path)}: it has a value already; write {word} without the plus."
    return twice if override.is_add() and not both else None
