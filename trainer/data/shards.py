"""Token ids on disk: flat files of little-endian ``uint16`` or ``uint32``, without header.

``NAME.ends``, beside each ``NAME.bin``, holds the end of each document in tokens, as ``uint32``. A
split is the concatenation of its shards; sequences of any length are views of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.common.errors import UserError, is_transient
from trainer.data.encoding import Encoded
from trainer.data.manifest import Shard
from trainer.data.order import Integers


class FlatFile:
    """One file of numbers of one type, all below ``below`` if it is given.

    The file is read and not memory-mapped. On a network file system, a missing page would fetch
    megabytes, and an unreadable one would kill the process instead of raising an error.
    """

    def __init__(self, path: Path, dtype: str, below: int | None = None) -> None:
        self.path, self.dtype, self.below = path, np.dtype(dtype), below

    def __getstate__(self) -> dict[str, Any]:
        """Omit the open file: another process opens its own."""
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
        """Read ``count`` numbers from index ``start``.

        Raises:
            UserError: the file ends early, holds numbers that are too large, or the disk fails.
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
    """Return a clause describing why a file lacks its expected size, or None."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if found == size else f"{path.name} has {found:,} bytes instead of {size:,}"


def wrong_bytes(path: Path, sha256: str) -> str | None:
    """Return a clause if a file's checksum differs, or None."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if found == sha256 else f"{path.name} is not what was written"


OPEN = 128
"""Shards of a split that are open at once; a process may often have 1,024 files."""


class ShardWriter:
    """Writer of one shard under a temporary name; only complete files get their final name."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self.tokens = name, 0
        self._directory = directory
        self._temporary = directory / f".{name}.{os.uname().nodename}.{os.getpid()}.tmp"
        self._file = self._temporary.open("wb")
        self._sum = hashlib.sha256()
        self._ends: list[NDArray[np.uint32]] = []

    def add(self, encoded: Encoded) -> None:
        """Append documents."""
        data = encoded.ids.tobytes()
        self._file.write(data)
        self._sum.update(data)
        self._ends.append((self.tokens + encoded.lengths.cumsum()).astype("<u4"))
        self.tokens += len(encoded.ids)

    def finish(self) -> Shard:
        """Flush the files to disk and rename them; return the shard."""
        ends = np.concatenate(self._ends).astype("<u4")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_synchronised(self._directory / f"{self.name}.ends", ends.tobytes())
        self._temporary.replace(self._directory / f"{self.name}.bin")
        checksum = hashlib.sha256(ends.tobytes()).hexdigest()
        return Shard(self.name, self.tokens, len(ends), self._sum.hexdigest(), checksum)

    def discard(self) -> None:
        """Remove the unfinished file."""
        try:
            self._file.close()  # closing flushes, which fails on a full disk
        finally:
            self._temporary.unlink(missing_ok=True)


def write_synchronised(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent, even after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        synchronise(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def synchronise(directory: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_problem(directory: Path, shard: Shard, dtype: np.dtype[Any]) -> str | None:
    """Return a clause if a file of the shard has the wrong size, or None."""
    ids, ends = (directory / f"{shard.name}{suffix}" for suffix in (".bin", ".ends"))
    return wrong_size(ids, shard.tokens * dtype.itemsize) or wrong_size(ends, shard.documents * 4)


def checksum_problem(directory: Path, shard: Shard) -> str | None:
    """Return a clause if a file of the shard has the wrong checksum, or None."""
    ids, ends = (directory / f"{shard.name}{suffix}" for suffix in (".bin", ".ends"))
    return wrong_bytes(ids, shard.sha256) or wrong_bytes(ends, shard.ends_sha256)


@dataclass(frozen=True)
class Place:
    """A shard and its directory; ``vocabulary`` is the size of its tokenizer."""

    directory: Path
    shard: Shard
    dtype: str
    vocabulary: int | None = None

    @property
    def ids(self) -> FlatFile:
        """File of all its token ids."""
        path = self.directory / f"{self.shard.name}.bin"
        return FlatFile(path, self.dtype, below=self.vocabulary)

    def ends(self) -> NDArray[np.uint32]:
        """Read the ends of its documents, in tokens."""
        return FlatFile(self.directory / f"{self.shard.name}.ends", "<u4").read(
            0, self.shard.documents
        )


class TokenStream:
    """One split: its shards as one stream of tokens."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self._starts = np.cumsum([0, *(place.shard.tokens for place in places)])

    def __reduce__(self) -> tuple[type[TokenStream], tuple[list[Place]]]:
        """Pickle only the places: another process opens the files itself."""
        return TokenStream, (self.places,)

    @cached_property
    def _ids(self) -> Callable[[int], FlatFile]:
        return lru_cache(OPEN)(lambda index: self.places[index].ids)

    def __len__(self) -> int:
        """Return the number of tokens in the stream."""
        return int(self._starts[-1])

    def documents(self, tokens: int) -> list[NDArray[Any]]:
        """Return the first documents with their end-of-text tokens, at most ``tokens`` in total."""
        found: list[NDArray[Any]] = []
        for place in self.places:
            ends = place.ends()
            ends = ends[: int(np.searchsorted(ends, tokens, side="right"))]
            if len(ends):
                found += np.split(place.ids.read(0, int(ends[-1])), ends[:-1])
            tokens -= place.shard.tokens
            if tokens <= 0:
                break
        return found

    def windows(self, starts: Integers, length: int) -> Integers:
        """Return ``[len(starts), length]`` tokens; a window may cross shards."""
        found = np.empty((len(starts), length), np.int64)
        for row, start in zip(found, starts.tolist(), strict=True):
            self.read(start, row)
        return found

    def read(self, start: int, into: Integers) -> None:
        """Fill ``into`` with the tokens from index ``start``."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < len(into):
            offset = start + done - int(self._starts[index])
            count = min(len(into) - done, self.places[index].shard.tokens - offset)
            into[done : done + count] = self._ids(index).read(offset, count)
            done += count
            index += 1
