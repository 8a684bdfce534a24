"""Configuration groups as dataclasses, the types of their fields, and their checks.

pydantic checks every value against these types, and its errors become problems; rules between
fields are functions of their rooms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from trainer.common.errors import Problem, did_you_mean, nearest
from trainer.common.processes import MOST_THREADS

T = TypeVar("T")
LARGEST = 1 << 62
"""Largest whole number taken: 2^62, within int64."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def configuration(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass without unknown keys and without infinite numbers."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]  # pydantic reads it
    return dataclass(frozen=True)(cls)


class WrongValueError(ValueError):
    """A value that a field does not take; ``place``: its key in a group whose keys users choose."""

    def __init__(self, expected: str, value: Any, place: str = "") -> None:
        self.expected, self.value, self.place = expected, value, place
        super().__init__(f"expected {expected}")


def _not_bool(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise WrongValueError("a whole number", value)
    return value


def _from_text(value: Any) -> Any:
    """Return the number in a text, such as the environment variable of ``${oc.env:SEED}``."""
    if isinstance(value, str):
        for number in (int, float):
            with suppress(ValueError):
                return number(value)
    return value


def _not_python_none(value: str) -> str:
    """Refuse ``None``, Python's word for null."""
    if value == "None":
        raise WrongValueError("a text", value)
    return value


def _finite(value: Any) -> Any:
    """Refuse infinite numbers, NaN and whole numbers beyond :data:`LARGEST`, at any depth."""
    for place, number in _numbers(value):
        if not math.isfinite(number):
            raise WrongValueError("a finite number", number, place)
        if isinstance(number, int) and abs(number) > LARGEST:
            raise WrongValueError(f"at most {LARGEST:,}", number, place)
    return value


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{place}[{index}]")


_WHOLE = BeforeValidator(_not_bool), BeforeValidator(_from_text)
Integer = Annotated[int, *_WHOLE, Field(ge=-LARGEST, le=LARGEST)]
"""A whole number."""
Count = Annotated[int, *_WHOLE, Field(ge=1, le=LARGEST)]
"""A whole number from 1."""
Natural = Annotated[int, *_WHOLE, Field(ge=0, le=LARGEST)]
"""A whole number from 0, such as a seed."""
Processes = Annotated[int, *_WHOLE, Field(ge=1, le=MOST_THREADS)]
"""Threads or processes of one machine."""
Number = Annotated[float, BeforeValidator(_from_text), Field(strict=True)]
"""A finite number."""
Positive = Annotated[float, BeforeValidator(_from_text), Field(strict=True, gt=0)]
"""A number above 0."""
NotNegative = Annotated[float, BeforeValidator(_from_text), Field(strict=True, ge=0)]
"""A number from 0."""
Share = Annotated[float, BeforeValidator(_from_text), Field(strict=True, ge=0, le=1)]
"""A number from 0 to 1."""
Rate = Annotated[float, BeforeValidator(_from_text), Field(strict=True, gt=0, le=1000)]
"""A learning rate, or a multiple of one."""
Multiple = Annotated[float, BeforeValidator(_from_text), Field(strict=True, gt=0, le=1_000_000)]
"""How many times something else, such as the training length."""
OptionalText = Annotated[str, AfterValidator(_not_python_none)] | None
"""A text, or null."""
FreeForm = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Keys that users choose, with values of any kind."""


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


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested groups, or None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


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
