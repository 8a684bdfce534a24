"""Files of numbers without a header, read by position."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.common.errors import UserError, is_transient


class FlatFile:
    """One file of numbers of a type, all less than ``below`` where that is given.

    It is read, not mapped: behind a network file system a page that is missing brings megabytes
    with it, and one that cannot be read kills the process instead of raising an error.
    """

    def __init__(self, path: Path, dtype: str, below: int | None = None) -> None:
        self.path, self.dtype, self.below = path, np.dtype(dtype), below

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which open the file themselves."""
        return {"path": self.path, "dtype": self.dtype, "below": self.below}

    @cached_property
    def _file(self) -> FileIO:
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        message = f"{str(self.path)!r} cannot be read: {error.strerror}."
        return UserError.at("data", message, transient=is_transient(error))

    def read(self, start: int, count: int) -> NDArray[Any]:
        """``count`` numbers from ``start`` on.

        Raises:
            UserError: they are not there, or too large, or the disk fails.
        """
        found = np.empty(count, self.dtype)
        into, done = found.view(np.uint8).data, 0
        while done < len(into):
            try:
                position = start * self.dtype.itemsize + done
                read = os.preadv(self._file.fileno(), [into[done:]], position)
            except OSError as error:
                raise self._error(error) from error
            if not read:
                raise UserError.at("data", f"{str(self.path)!r} cannot be read: it ends early.")
            done += read
        if self.below is not None and count and (largest := int(found.max())) >= self.below:
            raise UserError.at(
                "data",
                f"{str(self.path)!r} is damaged: it holds the id {largest}, and those of the "
                f"tokenizer end at {self.below - 1}; remove the directory and prepare it again.",
            )
        return found


def wrong_size(path: Path, size: int) -> str | None:
    """What is wrong with a file of so many bytes by its size, as a clause."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if found == size else f"{path.name} has {found:,} bytes instead of {size:,}"


def wrong_bytes(path: Path, sha256: str) -> str | None:
    """What is wrong with the bytes of a file, as a clause."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == sha256 else f"{path.name} is not what was written"
