"""Configuration groups as dataclasses, and the types of their fields.

pydantic checks every value against these types; rules between fields are functions of their rooms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

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
