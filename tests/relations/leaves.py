"""Leaves of dataclasses, and another legal value for each, made from the type of its field."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError


@cache
def hints(schema: type) -> dict[str, Any]:
    """The types of a dataclass's fields with their constraints."""
    return get_type_hints(schema, include_extras=True)


def leaves(whole: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields that hold no dataclass."""
    for each in fields(whole):
        path, value = f"{prefix}{each.name}", getattr(whole, each.name)
        if is_dataclass(value):
            yield from leaves(value, f"{path}.")
        else:
            yield path


def value_at(whole: Any, path: str) -> Any:
    for name in path.split("."):
        whole = getattr(whole, name)
    return whole


def with_value(whole: Any, path: str, value: Any) -> Any:
    """A copy of a dataclass with another value at a path."""
    name, _, inner = path.partition(".")
    new = with_value(getattr(whole, name), inner, value) if inner else value
    return replace(whole, **{name: new})


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the path ``a.b``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def other_value(whole: Any, path: str) -> Any:
    """Another legal value of a leaf."""
    group, _, name = path.rpartition(".")
    holder = value_at(whole, group) if group else whole
    kind, value = hints(type(holder))[name], getattr(holder, name)
    check = TypeAdapter(kind)
    for candidate in candidates(kind, value):
        try:
            legal = check.validate_python(candidate)
        except ValidationError:
            continue
        if legal != value or type(legal) is not type(value):
            return legal
    raise AssertionError(f"{path}: no other value of {kind}")


def candidates(kind: Any, value: Any) -> Iterator[Any]:
    """Values to try, some of which are of the type."""
    if hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]
    origin, arms = get_origin(kind), get_args(kind)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if origin is Literal:
        yield from arms
    elif origin in (Union, types.UnionType):
        for arm in arms:
            yield from candidates(arm, value)
    elif origin in (list, tuple, dict):
        yield from with_items(origin, arms, value)
    elif is_dataclass(kind):
        yield kind()
    else:
        plain = {
            bool: [not value],
            int: [number + 1, number - 1, 2],
            float: [number / 2, number + 0.25, 1.5],
            str: [f"{value or ''}x", "0:00:07"],
        }
        yield from plain.get(kind, [])


def with_items(origin: type, arms: tuple[Any, ...], value: Any) -> Iterator[Any]:
    """Collections with an item more, another one, or one less."""
    if origin is dict:
        for item in ({"a": 1}, {"steps": 1}, 0.5):
            yield {**(value or {}), "added": item}
        return
    if origin is tuple and not value and Ellipsis not in arms:
        yield tuple(next(candidates(arm, None)) for arm in arms)
        return
    items = list(value or [])
    last = items[-1] if items else None
    for item in candidates(arms[-1] if arms[-1] is not Ellipsis else arms[0], last):
        yield origin([*items, item])
        yield origin([*items[:-1], item])
    yield origin(items[:-1])
