"""Reading of JSON files as a declared type; anything else is refused in one line.

A file may be damaged, cut short, or written by somebody else. It contains the number of its format,
and a newer format is refused, not misread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from trainer.common.errors import first_line

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
