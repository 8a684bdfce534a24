"""Token ids on disk: flat files of little-endian ``uint16`` or ``uint32``, without a header.

Beside every ``NAME.bin`` lies ``NAME.ends``: where each document ends, in tokens, as ``uint32``.
A split is its shards one after the other; sequences of any length are views of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.encoding import Encoded
from trainer.data.flat_file import FlatFile, wrong_bytes, wrong_size
from trainer.data.manifest import Shard
from trainer.data.order import Integers

OPEN = 128
"""Shards of a split that are open at once; a process may often have 1,024 files."""


class ShardWriter:
    """Writes one shard under a temporary name; nothing has its final name before it is whole."""

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
        """Bring the files to disk and give them their names."""
        ends = np.concatenate(self._ends).astype("<u4")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_synchronised(self._directory / f"{self.name}.ends", ends.tobytes())
        self._temporary.replace(self._directory / f"{self.name}.bin")
        checksum = hashlib.sha256(ends.tobytes()).hexdigest()
        return Shard(self.name, self.tokens, len(ends), self._sum.hexdigest(), checksum)

    def discard(self) -> None:
        """Leave nothing behind."""
        try:
            self._file.close()  # which may have to write, to a full disk
        finally:
            self._temporary.unlink(missing_ok=True)


def write_synchronised(path: Path, data: bytes) -> None:
    """Write a file that is either whole or absent, also after a power failure."""
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
    """Bring the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_problem(directory: Path, shard: Shard, dtype: np.dtype[Any]) -> str | None:
    """What is wrong with the files of a shard by their size, as a clause."""
    ids, ends = (directory / f"{shard.name}{suffix}" for suffix in (".bin", ".ends"))
    return wrong_size(ids, shard.tokens * dtype.itemsize) or wrong_size(ends, shard.documents * 4)


def checksum_problem(directory: Path, shard: Shard) -> str | None:
    """What is wrong with the bytes of a shard, as a clause."""
    ids, ends = (directory / f"{shard.name}{suffix}" for suffix in (".bin", ".ends"))
    return wrong_bytes(ids, shard.sha256) or wrong_bytes(ends, shard.ends_sha256)


@dataclass(frozen=True)
class Place:
    """A shard where it lies; ``vocabulary``: how many ids its tokenizer has."""

    directory: Path
    shard: Shard
    dtype: str
    vocabulary: int | None = None

    @property
    def ids(self) -> FlatFile:
        """All its tokens."""
        path = self.directory / f"{self.shard.name}.bin"
        return FlatFile(path, self.dtype, below=self.vocabulary)

    def ends(self) -> NDArray[np.uint32]:
        """Where its documents end."""
        return FlatFile(self.directory / f"{self.shard.name}.ends", "<u4").read(
            0, self.shard.documents
        )


class TokenStream:
    """One split: its shards as one stream of tokens."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self._starts = np.cumsum([0, *(place.shard.tokens for place in places)])

    def __reduce__(self) -> tuple[type[TokenStream], tuple[list[Place]]]:
        """For other processes: where it lies."""
        return TokenStream, (self.places,)

    @cached_property
    def _ids(self) -> Callable[[int], FlatFile]:
        return lru_cache(OPEN)(lambda index: self.places[index].ids)

    def __len__(self) -> int:
        """Tokens in the stream."""
        return int(self._starts[-1])

    def documents(self, tokens: int) -> list[NDArray[Any]]:
        """The first documents with their end-of-text tokens, at most ``tokens`` in all."""
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
        """``[len(starts), length]`` tokens; a window may cross shards."""
        found = np.empty((len(starts), length), np.int64)
        for row, start in zip(found, starts.tolist(), strict=True):
            self.read(start, row)
        return found

    def read(self, start: int, into: Integers) -> None:
        """Fill ``into`` with the tokens from ``start`` on."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < len(into):
            offset = start + done - int(self._starts[index])
            count = min(len(into) - done, self.places[index].shard.tokens - offset)
            into[done : done + count] = self._ids(index).read(offset, count)
            done += count
            index += 1
