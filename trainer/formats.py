"""What is written to disk is read back as what it is declared to be, or refused in one line.

A file may be damaged, cut short, or come from somebody else. It carries the number of its format; a
newer one is refused, not misread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from trainer.common.errors import UserError, first_line
from trainer.common.validation import adapter

T = TypeVar("T")
FIRST = 1
"""The format of what was written before there were numbers."""
LARGEST = 256 << 20
"""Bytes of a file that is read as a whole; the largest is a description with its tokenizer."""
Count = Annotated[int, Field(ge=0, le=10**15)]
"""Of steps, tokens, bytes: more are none that anything here counted."""


def read_plain(path: Path, largest: int = LARGEST) -> Any:
    """The plain values of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large or no JSON; says so in one line.
    """
    data = read_content(path, largest)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {first_line(error)}") from None


def read_as(path: Path, kind: type[T], largest: int = LARGEST) -> T:
    """A JSON file as ``kind``, a dataclass or another annotation; nothing is converted.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, no JSON, or holds something else; says where, in one line.
    """
    data = read_content(path, largest)
    try:
        return adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Where the first of pydantic's findings is, and what."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def read_content(path: Path, largest: int = LARGEST) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or a pipe, which would be waited for.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is no file")
    size = path.stat().st_size
    if size > largest:
        raise ValueError(f"it has {size:,} bytes, at most {largest:,} are read")
    return path.read_bytes()


def check_format(found: Any, newest: int, key: str, what: str, otherwise: str) -> None:
    """Refuse what a newer version of this program wrote.

    Args:
        found: the number that stands there, :data:`FIRST` where there is none.
        newest: the last format that this version reads.
        key: the configuration key that led there.
        what: names the file.
        otherwise: what to do but installing a newer version.

    Raises:
        UserError: the number is newer, or no format's.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < FIRST:
        raise UserError.at(
            key, f"{what} is damaged: its format is {found!r}, expected a whole number."
        )
    if found > newest:
        raise UserError.at(
            key,
            f"{what} has format {found}, this version of unrope reads up to {newest}; install a "
            f"newer one, or {otherwise}.",
        )
