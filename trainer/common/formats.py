"""Reading of JSON files as a declared type; anything else is refused in one line.

A file may be damaged, cut short, or written by somebody else. It contains the number of its format,
and a newer format is refused, not misread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from trainer.common.errors import UserError, first_line
from trainer.common.fields import adapter

T = TypeVar("T")
FIRST = 1
"""Format of files without a number."""
LARGEST = 256 << 20
"""Largest file that is read, in bytes; checkpoint descriptions with a tokenizer are the largest."""
Count = Annotated[int, Field(ge=0, le=10**15)]
"""Number of steps, tokens or bytes; a larger one is damage."""


def read_plain(path: Path) -> Any:
    """Return the plain values of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large or no JSON; the message is one line.
    """
    data = read_content(path)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {first_line(error)}") from None


def read_as(path: Path, kind: type[T]) -> T:
    """Return a JSON file as ``kind``, a dataclass or another annotation; nothing is converted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, no JSON, or contains something else; the message is one line
            and says where.
    """
    data = read_content(path)
    try:
        return adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Return the place and message of pydantic's first error."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def read_content(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, or no regular file: reading a pipe would block.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is no file")
    size = path.stat().st_size
    if size > largest:
        raise ValueError(f"it has {size:,} bytes, at most {largest:,} are read")
    return path.read_bytes()


def check_format(number: Any, newest: int, key: str, file: str, otherwise: str) -> None:
    """Check that this version can read format ``number`` of a file, :data:`FIRST` if it has none.

    ``otherwise``: what the user can do instead of installing a newer version.

    Raises:
        UserError: the format is newer, or not a whole number.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < FIRST:
        raise UserError.at(
            key, f"{file} is damaged: its format is {number!r}, expected a whole number."
        )
    if number > newest:
        raise UserError.at(
            key,
            f"{file} has format {number}, this version of unrope reads up to {newest}; install a "
            f"newer one, or {otherwise}.",
        )
