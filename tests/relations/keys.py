"""Keys and the leaves of their input that they leave out; inputs that several keys have.

A key names a stored result or decides whether two things are the same. For each leaf of its input
the leaf alone is changed: the key must change too, or the leaf must be in ``without``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from tests.relations.leaves import get, hints, others, with_value
from trainer.evaluation.fitting import FitText
from trainer.evaluation.loss import AnsweredTexts
from trainer.evaluation.store import Store
from trainer.positional.config import PositionalConfig, build_layout


@dataclass
class Key:
    """A key that ``make`` computes from ``value``; ``without``: the leaves it omits, with reasons.

    ``other``: other values of leaves whose types do not give any. ``files``: leaves that name
    files, whose content is read instead of their names.
    """

    value: Any
    make: Any
    without: dict[str, str] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def all_leaves(value, path=""):
    """Yield the dotted path of every leaf, also of fields that hold arrays or objects."""
    for item in fields(value):
        inner = getattr(value, item.name)
        if is_dataclass(inner):
            yield from all_leaves(inner, f"{path}{item.name}.")
        else:
            yield f"{path}{item.name}"


def changed(value, path):
    """Yield another value of a leaf, made from its present value."""
    now = get(value, path)
    if isinstance(now, np.ndarray):
        yield now + 1
    elif isinstance(now, dict) and now and all(isinstance(x, np.ndarray) for x in now.values()):
        yield {key: array + 1 for key, array in now.items()}
    elif isinstance(now, bool):
        yield not now
    elif isinstance(now, int | float):
        yield now + 1
    elif isinstance(now, str):
        yield f"{now}x"
    elif isinstance(now, tuple) and now and isinstance(now[0], int | float):
        yield (*now[:-1], now[-1] / 2 + 1)
    else:
        *group, name = path.split(".")
        holder = get(value, ".".join(group)) if group else value
        yield from others(hints(type(holder))[name], now)


def ignored_leaves(key):
    """Return the leaves with which a key does not change, sorted."""
    before, ignored = key.make(key.value), []
    assert key.make(key.value) == before
    for path in {*all_leaves(key.value)} - {*key.files}:
        other = key.other[path] if path in key.other else next(changed(key.value, path))
        if key.make(with_value(key.value, path, other)) == before:
            ignored.append(path)
    return sorted(ignored)


WINDOWS = {4: np.arange(8).reshape(2, 4)}
ASKED = {4: AnsweredTexts(np.arange(8).reshape(2, 4), np.arange(2))}
FIT_TEXT = FitText(WINDOWS, 0, "text", ASKED, WINDOWS, (0, 1))
LAYOUT = build_layout(
    PositionalConfig(), num_layers=2, num_key_value_heads=2, head_dim=8, training_length=32
)


class Paths(Store):
    """A store that returns where a value would be."""

    def get(self, kind, key, make):
        """Return the path."""
        return self.path(kind, key)
