"""Configuration groups as dataclasses, which pydantic checks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainer.common.errors import UserError

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def configuration(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that refuses unknown keys, infinite numbers and NaN.

    A number given for a text field becomes text: ``revision=2024`` is ``"2024"``.
    """
    checks = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    cls.__pydantic_config__ = checks  # type: ignore[attr-defined]  # pydantic reads it
    return dataclass(frozen=True)(cls)


Share = Annotated[float, Field(ge=0, le=1)]
"""A number, at least 0 and at most 1."""

adapter: Callable[..., TypeAdapter[Any]] = cache(TypeAdapter)
"""Returns pydantic's checker of a type, made once."""


def validated(schema: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """Return ``values`` as the dataclass ``schema``; ``prefix``: of their keys in messages. Raise a
    UserError with pydantic's messages of unknown keys and wrong values, a line each."""
    try:
        return adapter(schema).validate_python(values)
    except ValidationError as error:
        # A union gives an error for each of its types, and one of its types may be a list.
        problems: dict[str, dict[str, Any]] = {}
        for e in error.errors():
            problems.setdefault(_key_of(e, values), {})[e["msg"]] = e["input"]
        outer = {key.rpartition(".")[0] for key in problems}
        lines = []
        for key in [key for key in problems if key not in outer]:
            expected, got = " or: ".join(problems[key]), [*problems[key].values()][-1]
            lines.append(f"{prefix}{key}: {expected}, got {got!r}")
        raise UserError("\n".join(lines)) from None


def _key_of(error: ErrorDetails, values: Any) -> str:
    """Return the key that an error is about; its location names the types of a union, too."""
    names = []
    for name in error["loc"]:
        with suppress(LookupError, TypeError):
            values = values[name]
            names.append(str(name))
    if error["type"] == "missing":
        names.append(str(error["loc"][-1]))
    return ".".join(names)
