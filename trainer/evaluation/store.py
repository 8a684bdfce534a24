"""A store of finished results, from which an interrupted evaluation resumes."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.common.files import write_atomically
from trainer.formats import FIRST, check_format, read_plain

log = logging.getLogger(__name__)
Floats = NDArray[np.floating[Any]]

FORMAT = 1
"""Of a piece's file."""


class Store:
    """One JSON file for each result, named by a hash of everything that the result depends on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sound: set[Path] = set()
        self._damaged: set[Path] = set()

    def path(self, kind: str, key: dict[str, Any]) -> Path:
        """The file of a result."""
        text = json.dumps(key, sort_keys=True, default=str)
        return self.directory / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Whether the result is stored; asked often, by ranks that wait for those of others."""
        path = self.path(kind, key)
        return path in self._sound or self._kept(path) is not None

    def get(self, kind: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The stored value, made and stored where it is missing or damaged; plain JSON values.

        Raises:
            UserError: the file is of a newer format.
        """
        path = self.path(kind, key)
        if (kept := self._kept(path)) is not None:
            check_format(kept[0], FORMAT, "output", repr(str(path)), "choose another output")
            return kept[1]
        value = json.loads(json.dumps(make(), allow_nan=False))
        piece = {"format": FORMAT, "key": key, "value": value, "sha256": _checksum(value)}
        write_atomically(path, json.dumps(piece, default=str) + "\n")
        return value

    def remove(self, kind: str, key: dict[str, Any]) -> None:
        """Delete a result."""
        path = self.path(kind, key)
        path.unlink(missing_ok=True)
        self._sound.discard(path)

    def _kept(self, path: Path) -> tuple[Any, Any] | None:
        """Format and value in a file, if they can be read and are what was written."""
        if not path.is_file():
            return None
        try:
            piece = read_plain(path)
            found = piece.get("format", FIRST), piece["value"]
            if "sha256" in piece and piece["sha256"] != _checksum(piece["value"]):
                raise ValueError("not what was written")
        except (ValueError, KeyError, TypeError, AttributeError):
            if path not in self._damaged:
                log.warning("%s is damaged; what it held is measured again", path)
                self._damaged.add(path)
            return None
        self._sound.add(path)
        return found


def pack(values: Floats) -> dict[str, Any]:
    """Return an array as plain values for a stored result, bit for bit."""
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
    return {"type": values.dtype.str, "shape": list(values.shape), "base64": data}


def unpack(packed: dict[str, Any]) -> Floats:
    """Return the array that :func:`pack` was given."""
    data = bytearray(base64.b64decode(packed["base64"]))
    return np.ndarray(packed["shape"], packed["type"], buffer=data)


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
