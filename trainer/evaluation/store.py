"""A store of finished results, from which an interrupted evaluation resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.formats import FIRST, check_format, read_plain
from trainer.report.atomic import write_atomically

FORMAT = 1
"""Of a piece's file."""


class Store:
    """One JSON file for each result, named by a hash of everything that the result depends on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, kind: str, key: dict[str, Any]) -> Path:
        """The file of a result."""
        text = json.dumps(key, sort_keys=True, default=str)
        return self.directory / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Whether the result is stored."""
        return self.path(kind, key).is_file()

    def get(self, kind: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The stored value, made and stored where it is missing; plain JSON values.

        Raises:
            UserError: the file is damaged, or of a newer format.
        """
        path = self.path(kind, key)
        if path.is_file():
            try:
                piece = read_plain(path)
                value, found = piece["value"], piece.get("format", FIRST)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"output: {str(path)!r} is damaged; remove it to have it measured again."
                ) from None
            check_format(found, FORMAT, f"output: {str(path)!r}", "choose another output")
            return value
        value = json.loads(json.dumps(make(), allow_nan=False))
        piece = {"format": FORMAT, "key": key, "value": value}
        write_atomically(path, json.dumps(piece, default=str) + "\n")
        return value
