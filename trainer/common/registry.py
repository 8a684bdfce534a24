"""Rows that functions register by name: those of the program, and of the files in ``plugins``."""

import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.common.errors import UserError

Row = TypeVar("Row")


def check_call(key: str, function: Callable[..., Any], /, *values: Any, **named: Any) -> None:
    """Raise a UserError about ``key`` unless a function takes these arguments."""
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        raise UserError(f"{key}: {error}") from None


class Registry(dict[str, Row]):
    """Rows by name, each of one function; ``kind``: what they are, for messages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._owners: dict[str, tuple[str | None, str]] = {}
        """File and name of the function of each row."""

    def add(self, name: str, row: Row, function: Callable[..., Any]) -> None:
        """Add the row of a function, or replace it if its file is run again; refuse taken names."""
        unwrapped = inspect.unwrap(function)
        file = unwrapped.__globals__.get("__file__")
        owner = file and os.path.realpath(file), unwrapped.__qualname__
        if name in self and self._owners.get(name, owner) != owner:
            raise UserError(f"{self.kind}: {name!r} exists; expected another name")
        self._owners[name] = owner
        self[name] = row

    def find(self, name: str, key: str) -> Row:
        """Return the row that ``key`` names; raise a UserError if there is none."""
        if name not in self:
            raise UserError(f"{key}: expected one of {', '.join(self)}, got {name!r}")
        return self[name]
