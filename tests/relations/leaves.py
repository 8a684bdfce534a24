"""Another legal value for each leaf of a configuration, made from the types of its fields."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError


@cache
def hints(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields with their constraints."""
    return get_type_hints(schema, include_extras=True)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, type and value of every field that is not a dataclass itself."""
    for field in fields(value):
        place, item = f"{path}{field.name}", getattr(value, field.name)
        if is_dataclass(item):
            yield from leaves(item, f"{place}.")
        else:
            yield place, hints(type(value))[field.name], item


def candidates(kind: Any, value: Any) -> Iterator[Any]:
    """Yield values to try, some of which are of the type."""
    if hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]
    origin, arms = get_origin(kind), get_args(kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        for arm in arms:
            yield from candidates(arm, value)
    elif origin in (list, tuple, dict):
        yield from _collections(origin, arms, value)
    elif is_dataclass(kind):
        yield kind()
    else:
        plain = {
            bool: [value is not True],
            int: [*([value + 1, 2 * value, value - 1] if is_number else []), 1, 2, 3],
            float: [*([value / 2, 2.0 * value, value + 0.25] if is_number else []), 0.5, 1.5, 3.0],
            str: [f"{value or ''}x", "x"],
            type(None): [None],
        }
        yield from plain.get(kind, arms or [1, "x"])


def _collections(origin: type, arms: tuple[Any, ...], value: Any) -> Iterator[Any]:
    """Yield collections with an item more, another one, or one less."""
    if origin is dict:
        yield from ({**(value or {}), "added": item} for item in candidates(arms[1], None))
        return
    items = list(value or [])
    last = items[-1] if items else None
    if origin is list:
        yield from ([*items, item] for item in candidates(arms[0], last))
        yield items[:-1]
    else:
        yield from ((*items[:-1], item) for item in candidates(arms[0], last))


def others(kind: Any, value: Any) -> Iterator[Any]:
    """Yield other legal values of a field, as the configuration would hold them."""
    adapter = TypeAdapter(kind)
    for candidate in candidates(kind, value):
        try:
            legal = adapter.validate_python(candidate)
        except ValidationError:
            continue
        if legal != value or type(legal) is not type(value):
            yield legal


def get(config: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def with_value(config: Any, path: str, value: Any) -> Any:
    """Return a copy of a dataclass with one leaf changed."""
    name, _, inner = path.partition(".")
    return replace(
        config, **{name: with_value(getattr(config, name), inner, value) if inner else value}
    )


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the path ``a.b``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value
