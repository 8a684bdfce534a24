"""Plain values as a dataclass: unknown keys and wrong types, all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from trainer.common.errors import Problem, did_you_mean
from trainer.formats import adapter

S = TypeVar("S")


def _unknown_keys(schema: Any, values: Any, path: str) -> list[Problem]:
    """Keys that the dataclass does not have, at any depth, groups that are no mappings, words that
    are meant to be none, and true and false where there are none, which are no 1 and 0."""
    if not isinstance(values, dict):
        return [Problem(path, f"expected a group of keys, got {values!r}.")]
    hints = _hints(schema)
    found = []
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        first, _, rest = str(key).partition(".")
        if key not in hints and first in hints and rest:
            nested = str(key).replace(".", ": {") + ": ..." + "}" * str(key).count(".")
            found.append(Problem(where, f"a key with dots; write {nested}."))
        elif key not in hints:
            found.append(Problem(where, "unknown key.", did_you_mean(str(key), hints)))
        elif value == "None" and type(None) in get_args(hints[key]) and key != "prompt":
            found.append(Problem(where, OF_PYTHON))
        elif _truth(value) and _leaves(hints[key]).isdisjoint({bool, Any}):
            words = sorted(leaf for leaf in _leaves(hints[key]) if isinstance(leaf, str))
            instead = f"; expected {', '.join(words)}." if words else ", which mean nothing here."
            found.append(Problem(where, NO_TRUTH + instead))
        elif dataclasses.is_dataclass(hints[key]):
            found += _unknown_keys(hints[key], value, where)
        elif get_origin(hints[key]) is dict:  # groups by name
            inner = get_args(hints[key])[1]
            if dataclasses.is_dataclass(inner) and isinstance(value, dict):
                for name, group in value.items():
                    found += _unknown_keys(inner, group, f"{where}.{name}")
        else:  # a group that may be missing, or a list of groups
            groups = [item for item in _listed(value) if isinstance(item, dict)]
            for inner in filter(dataclasses.is_dataclass, get_args(hints[key])):
                found += [p for group in groups for p in _unknown_keys(inner, group, where)]
    return found


OF_PYTHON = "got 'None', which is Python's word; nothing is written null."
NO_TRUTH = "got true or false"
_hints = cache(get_type_hints)
"""The types of a dataclass's fields, looked up once."""


def _truth(value: Any) -> bool:
    """Whether it is true or false, or a list or mapping in which one is."""
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_truth, value)))


def _leaves(hint: Any) -> set[Any]:
    """The types that an annotation is made of; groups within it say for themselves."""
    if dataclasses.is_dataclass(hint):
        return {Any}
    return set().union(*map(_leaves, get_args(hint))) or {hint}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _type_problem(error: Any) -> Problem:
    """One sentence for one of pydantic's findings."""
    expected = error["msg"][0].lower() + error["msg"][1:]
    hint = ""
    if error["type"] == "literal_error":
        hint = did_you_mean(str(error["input"]), _quoted(error["ctx"]["expected"]))
    elif error["type"] == "list_type" and isinstance(error["input"], str | int | float):
        hint = f" Of this one alone it is {_place(error)}=[{error['input']}]."
    elif error["type"] == "tuple_type":
        expected = "expected a list in brackets"
    return Problem(_place(error), f"got {error['input']!r}; {expected}.", hint)


def _place(error: Any) -> str:
    """The key that one of pydantic's findings is about."""
    return ".".join(str(part) for part in error["loc"] if str(part) not in _UNION_ARMS)


_UNION_ARMS = {"int", "float", "str", "bool", "list[int]"}


def _quoted(expected: str) -> list[str]:
    return [word for i, word in enumerate(expected.split("'")) if i % 2]


def validated(schema: type[S], values: dict[str, Any]) -> tuple[S, list[Problem]]:
    """``values`` as the dataclass ``schema``, and a sentence for every unknown key and wrong type.

    Keys of a wrong type have their defaults in the result, so that the rest can be checked too.
    """
    problems = _unknown_keys(schema, values, "")
    wrong = [p.key for p in problems if p.message.startswith((OF_PYTHON, NO_TRUTH))]
    values = without(values, [key.split(".") for key in wrong])
    try:
        found = adapter(schema).validate_python(values)
    except ValidationError as error:
        # One for each place: of a union each arm has its say, of a group the keys have had theirs.
        found_at = {_place(e): _type_problem(e) for e in error.errors()}
        problems += [
            text for where, text in found_at.items() if not any(p.key == where for p in problems)
        ]
        values = without(values, [e["loc"] for e in error.errors()])
        try:
            found = adapter(schema).validate_python(values)
        except ValidationError as again:  # of a group where a value belongs
            wrong_keys = {e["loc"][0] for e in again.errors()}
            values = {key: value for key, value in values.items() if key not in wrong_keys}
            found = adapter(schema).validate_python(values)
    return found, problems


def without(values: dict[str, Any], locations: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A copy of ``values`` without the keys at ``locations`` (the deepest mapping's key each)."""
    copy = {k: without(v, []) if isinstance(v, dict) else v for k, v in values.items()}
    for location in locations:
        place = copy
        for key in location:
            if not isinstance(place.get(key), dict):
                place.pop(key, None)
                break
            place = place[key]
    return copy
