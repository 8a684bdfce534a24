"""Finished results on disk, each in a file named by a hash of everything that it depends on.

An interrupted evaluation resumes from them, and several processes share them. A key that omits an
input would return the wrong result.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.common.files import write_atomically

POLL = 0.2
"""Seconds between checks for results of other processes."""


def fingerprint(*parts: Any) -> str:
    """Return a hash of plain values, dataclasses and arrays, sixteen hexadecimal digits.

    Raises:
        TypeError: a value has another type, whose text may not identify it.
    """
    text = json.dumps(parts, sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_json(value: Any) -> Any:
    """Return a dataclass or an array as values that ``json`` knows."""
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return ["array", value.dtype.str, value.shape, content]
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, items]
    raise TypeError(f"no key can be made of {value!r}")


class Store:
    """Directory of results, one JSON file each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, kind: str, key: dict[str, Any]) -> Path:
        """Return the path of a result's file."""
        return self.directory / f"{kind}-{fingerprint(key)}.json"

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Return whether the result is stored."""
        return self.path(kind, key).is_file()

    def put(self, kind: str, key: dict[str, Any], value: Any) -> None:
        """Store a JSON value."""
        text = json.dumps({"key": key, "value": value})
        write_atomically(self.path(kind, key), text + "\n")

    def wait(self, kind: str, key: dict[str, Any]) -> Any:
        """Return the result, with lists for tuples, as soon as it is stored.

        There is no time limit: if another process fails, their launcher ends all of them.
        """
        while not self.has(kind, key):
            time.sleep(POLL)
        return json.loads(self.path(kind, key).read_text(encoding="utf-8"))["value"]
