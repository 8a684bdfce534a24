"""Keys under which results are stored and compared.

A key that leaves an input out takes one result for another. So a key is made of all fields of what
was asked. What is left out is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any

import numpy as np


def all_fields(value: Any, without: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return every field of a dataclass, or every item of a mapping, but for those of ``without``.

    Args:
        value: what was asked.
        without: the reason for each field that is left out. A dataclass must have it.
    """
    left_out = without or {}
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key not in left_out}
    names = [one.name for one in fields(value)]
    if unknown := sorted(left_out.keys() - {*names}):
        raise ValueError(f"{type(value).__name__} has no field {', '.join(unknown)}")
    return {name: getattr(value, name) for name in names if name not in left_out}


def fingerprint(*parts: Any) -> str:
    """Return a hash of plain values, dataclasses and arrays, sixteen hexadecimal digits.

    Raises:
        TypeError: a value is of another type, whose text need not say all that it is.
    """
    digest = sha256()
    for piece in _pieces(parts):
        digest.update(len(piece).to_bytes(8))  # or "12", "3" would be "1", "23"
        digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a value, of what it holds each by itself."""
    if isinstance(value, np.ndarray):
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield value.tobytes()
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        yield from _pieces(all_fields(value))
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from _pieces(key)
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        raise TypeError(f"no key can be made of {value!r}")
