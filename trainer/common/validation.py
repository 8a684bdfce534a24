"""Plain values as a configuration: pydantic's errors become problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from trainer.common.errors import Problem, did_you_mean, nearest
from trainer.common.fields import WrongValueError

S = TypeVar("S")
Place = tuple[str | int, ...]
"""Keys and indices from the outermost to the innermost."""


_adapter: Callable[..., TypeAdapter[Any]] = cache(TypeAdapter)


def adapter(kind: type[S]) -> TypeAdapter[S]:
    """Return pydantic's checker of a type, made once."""
    return _adapter(kind)


def validated(schema: type[S], values: dict[str, Any]) -> tuple[S, list[Problem]]:
    """Return ``values`` as the dataclass ``schema``, and its unknown keys and wrong values.

    Wrong values are replaced by defaults, so that all others can be checked too.
    """
    config, unknown, wrong = checked(schema, values)
    return config, [*unknown, *wrong]


def checked(schema: type[S], values: dict[str, Any]) -> tuple[S, list[Problem], list[Problem]]:
    """Validate as :func:`validated` does, and return unknown keys and wrong values separately."""
    unknown: dict[str, Problem] = {}
    wrong: dict[str, Problem] = {}
    while True:
        try:
            return adapter(schema).validate_python(values), [*unknown.values()], [*wrong.values()]
        except ValidationError as error:
            errors_at: dict[Place, list[Any]] = {}
            for error_details in error.errors(include_url=False):
                errors_at.setdefault(_place(values, error_details["loc"]), []).append(error_details)
        for place, errors in errors_at.items():
            if errors[0]["type"] in ("unexpected_keyword_argument", "invalid_key"):
                problem = _unknown_key(schema, place)
                unknown.setdefault(problem.key, problem)
            else:
                # One problem for all items of a list.
                whole = _dotted(place[:-1] if isinstance(place[-1], int) else place)
                wrong.setdefault(whole, _wrong_value(schema, place, errors))
        values = without(values, [*errors_at])


def _place(values: Any, location: Sequence[str | int]) -> Place:
    """Return the keys of one of pydantic's locations, which also name the arms of unions."""
    keys: list[str | int] = []
    for part in location:
        is_item = isinstance(values, list | tuple) and part in range(len(values))
        if is_item or (isinstance(values, dict) and part in values):
            values = values[part]
            keys.append(part)
    return tuple(keys)


def _unknown_key(schema: Any, place: Place) -> Problem:
    *group, key = place
    names = _hints(_type_at(schema, group))
    first, *inner = str(key).split(".")
    if first in names and inner:
        nested = first + "".join(f": {{{part}" for part in inner) + ": ..." + "}" * len(inner)
        return Problem(_dotted(place), f"a key with dots; write {nested}.")
    return Problem(_dotted(place), "unknown key.", did_you_mean(str(key), names))


def _wrong_value(schema: Any, place: Place, errors: Sequence[Any]) -> Problem:
    """Return the problem of one value; ``errors``: of each type that it may have."""
    first, kind = errors[0], _type_at(schema, place)
    inside, value = "", first["input"]
    if isinstance(refused := first.get("ctx", {}).get("error"), WrongValueError):
        inside, value = refused.place, refused.value
    expected = list(dict.fromkeys(_expected(details, kind) for details in errors))
    if len(expected) > 1 and "a text" not in expected:
        expected = [details for details in expected if details != "a whole number"]
    if isinstance(value, float) and not math.isfinite(value):
        expected = ["a finite number"]
    hint = ""
    if choices := _choices(kind):
        near = nearest(value, choices) if isinstance(value, str) else None
        hint = f"Did you mean {near!r}?" if near is not None else ""
    elif value == "None" and type(None) in _arms(kind):
        hint = "Use null for 'not set'."
    elif get_origin(kind) in (list, tuple) and isinstance(value, str | int | float):
        hint = f"To give this one alone: '{_dotted(place)}=[{value}]'."
    key = _dotted(place) + inside
    return Problem(key, f"expected {' or '.join(expected)}, got {shown(value)}.", hint)


_YAML = {None: "null", True: "true", False: "false"}


def shown(value: Any) -> str:
    """Return a value as messages show it: null, true and false as in YAML."""
    return _YAML[value] if value is None or isinstance(value, bool) else repr(value)


def _plain(bound: float) -> str:
    """Return ``1`` for 1.0, and large numbers with commas."""
    return f"{int(bound) if float(bound).is_integer() else bound:,}"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list in brackets",
    "tuple": "a list in brackets",
    "dict": "a group of keys",
    "dataclass": "a group of keys",
    "finite": "a finite number",
}
"""What pydantic's types of errors, up to their first underscore, ask for."""


def _expected(error: Any, kind: Any) -> str:
    """Describe the value that one of pydantic's errors expected."""
    context: dict[str, Any] = error.get("ctx", {})
    bounds = {
        "gt": "more than {}",
        "ge": "{} or more",
        "lt": "less than {}",
        "le": "at most {}",
        "min_length": "a list of {}",
        "max_length": "a list of {}",
    }
    if isinstance(refused := context.get("error"), WrongValueError):
        text = refused.expected
    elif choices := _choices(kind):
        text = f"one of {', '.join(map(str, choices))}"
    elif bound := next((key for key in bounds if key in context), None):
        positive = bound == "gt" and context[bound] == 0
        text = "a positive number" if positive else bounds[bound].format(_plain(context[bound]))
    elif error["type"] == "missing":  # an item of a tuple
        text = f"a list of {len(get_args(kind))}"
    else:
        text = _KINDS.get(error["type"].split("_")[0], "another value")
    return text


def _type_at(kind: Any, place: Iterable[str | int]) -> Any:
    """Return the annotation of a place in a dataclass; ``Any`` where users choose the keys."""
    for key in place:
        for arm in _arms(kind):
            if is_dataclass(arm):
                kind = _hints(arm).get(str(key), Any)
            elif get_origin(arm) in (dict, list, tuple):
                kind = next((item for item in reversed(get_args(arm)) if item is not ...), Any)
            else:
                continue
            break
        else:
            return Any
    return next((arm for arm in _arms(kind) if is_dataclass(arm)), kind)


def _arms(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _choices(kind: Any) -> list[Any]:
    """Return the words that a value may be, none where it may be something else."""
    return [choice for arm in _arms(kind) if get_origin(arm) is Literal for choice in get_args(arm)]


_type_hints = cache(get_type_hints)


def _hints(schema: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, looked up once."""
    return _type_hints(schema) if isinstance(schema, type) and is_dataclass(schema) else {}


def _dotted(place: Iterable[str | int]) -> str:
    """Return ``positional.windows[1]`` for the keys and indices of a place."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def without(values: dict[str, Any], places: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return a copy of ``values`` without the keys at ``places``; a list is left out as a whole."""
    copy = {k: without(v, []) if isinstance(v, dict) else v for k, v in values.items()}
    for keys in places:
        group = copy
        for depth, key in enumerate(keys):
            if depth == len(keys) - 1 or not isinstance(group.get(key), dict):
                group.pop(key, None)
                break
            group = group[key]
    return copy
