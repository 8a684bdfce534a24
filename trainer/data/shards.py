"""Prepared text on disk: flat files of token ids, and the JSON files that list them.

Ids are little-endian ``uint16`` or ``uint32``, without header. ``NAME.ends``, beside each
``NAME.bin``, holds the end of each document in tokens, as ``uint32``. A split is the concatenation
of its shards; sequences of any length are views of it.

Files may be damaged or come from someone else. JSON is parsed into the types here or refused, and
the only names in it that become paths are the names of shards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trainer.common.errors import UserError, is_transient, os_reason
from trainer.common.files import checksum, write_atomically
from trainer.common.formats import Count, check_format, read_as, read_plain
from trainer.data.encoding import Encoded, Split
from trainer.data.order import Integers

TableName = Literal["starts", "lengths", "blocks"]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A finished file of ids: ``name`` without suffix, its contents, and the SHA-256 checksums of
    the ids and of the document ends."""

    name: Annotated[str, Field(pattern=r"^(train|validation|test)-\d{5,9}-\d{4,9}$")]
    tokens: Count
    documents: Count
    sha256: Checksum
    ends_sha256: Checksum


@dataclass(frozen=True)
class Piece:
    """One finished piece of a unit.

    ``rows`` counts the unit's rows up to the end of this piece, ``bad`` the malformed ones among
    them, of which ``named`` describes the first. ``last``: the unit ends with this piece.
    """

    rows: Count
    bad: Count
    named: list[str]
    last: bool
    shards: dict[Split, Shard]


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared text: its request, source and shards."""

    format: int
    request: dict[str, Any]
    source: dict[str, Any]
    dtype: Literal["<u2", "<u4"]
    end_of_text: Count
    tokenizer_sha256: Checksum
    bad_rows: Count
    tokens: dict[Split, Count]
    documents: dict[Split, Count]
    shards: dict[Split, list[Shard]]


@dataclass(frozen=True)
class Table:
    """One file of a packing: its number of entries and its SHA-256 checksum."""

    count: Count
    sha256: Checksum


@dataclass(frozen=True)
class Packing:
    """Files of the best-fit packing for one sequence length, by name."""

    tables: dict[TableName, Table]


def read_json(path: Path, kind: type[T], newest: int | None = None, name: str = "") -> T:
    """Parse a file as ``kind``; ``newest`` is the newest format supported, ``name`` names the file
    in errors.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged; the message says where, in one line.
        UserError: the file has another format.
    """
    if newest is not None:
        plain = read_plain(path)
        if not isinstance(plain, dict) or "format" not in plain:
            raise ValueError("it has no format")
        check_format(
            plain["format"], newest, "data", name, "remove the directory to prepare it again"
        )
        if plain["format"] < newest:
            raise UserError.at(
                "data", f"{name} has format {plain['format']}, which is no longer read; remove it."
            )
    return read_as(path, kind)


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
        message = f"{str(self.path)!r} cannot be read: {os_reason(error)}."
        return UserError.at("data", message, transient=is_transient(error))

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Read ``count`` numbers from index ``start``.

        Raises:
            UserError: the file ends early, holds numbers that are too large, or the disk fails.
        """
        numbers = np.empty(count, self.dtype)
        into, done = numbers.view(np.uint8).data, 0
        while done < len(into):
            try:
                position = start * self.dtype.itemsize + done
                read = os.preadv(self._file.fileno(), [into[done:]], position)
            except OSError as error:
                raise self._error(error) from error
            if not read:
                raise UserError.at("data", f"{str(self.path)!r} cannot be read: it ends early.")
            done += read
        if self.below is not None and count and (largest := int(numbers.max())) >= self.below:
            raise UserError.at(
                "data",
                f"{str(self.path)!r} is damaged: it holds the id {largest}, and those of the "
                f"tokenizer end at {self.below - 1}; remove the directory and prepare it again.",
            )
        return numbers


def wrong_size(path: Path, size: int) -> str | None:
    """Return a clause describing why a file lacks its expected size, or None."""
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({os_reason(error)})"
    return None if actual == size else f"{path.name} has {actual:,} bytes instead of {size:,}"


def wrong_bytes(path: Path, sha256: str) -> str | None:
    """Return a clause if a file's checksum differs, or None."""
    try:
        return None if checksum(path) == sha256 else f"{path.name} is not what was written"
    except OSError as error:
        return f"{path.name} cannot be read ({os_reason(error)})"


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
        write_atomically(self._directory / f"{self.name}.ends", ends.tobytes(), durable=True)
        self._temporary.replace(self._directory / f"{self.name}.bin")
        of_ends = hashlib.sha256(ends.tobytes()).hexdigest()
        return Shard(self.name, self.tokens, len(ends), self._sum.hexdigest(), of_ends)

    def discard(self) -> None:
        """Remove the unfinished file."""
        try:
            self._file.close()  # closing flushes, which fails on a full disk
        finally:
            self._temporary.unlink(missing_ok=True)


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
        return FlatFile(self._path(".bin"), self.dtype, below=self.vocabulary)

    def ends(self) -> NDArray[np.uint32]:
        """Read the ends of its documents, in tokens."""
        return FlatFile(self._path(".ends"), "<u4").read(0, self.shard.documents)

    def size_problem(self) -> str | None:
        """Return a clause if a file of the shard has the wrong size, or None."""
        bytes_of_ids = self.shard.tokens * np.dtype(self.dtype).itemsize
        return wrong_size(self._path(".bin"), bytes_of_ids) or wrong_size(
            self._path(".ends"), self.shard.documents * 4
        )

    def checksum_problem(self) -> str | None:
        """Return a clause if a file of the shard has the wrong checksum, or None."""
        return wrong_bytes(self._path(".bin"), self.shard.sha256) or wrong_bytes(
            self._path(".ends"), self.shard.ends_sha256
        )

    def _path(self, suffix: str) -> Path:
        return self.directory / f"{self.shard.name}{suffix}"


OPEN = 128
"""Shards of a split that are open at once; a process may often have 1,024 files."""


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
        documents: list[NDArray[Any]] = []
        for place in self.places:
            ends = place.ends()
            ends = ends[: int(np.searchsorted(ends, tokens, side="right"))]
            if len(ends):
                documents += np.split(place.ids.read(0, int(ends[-1])), ends[:-1])
            tokens -= place.shard.tokens
            if tokens <= 0:
                break
        return documents

    def windows(self, starts: Integers, length: int) -> Integers:
        """Return ``[len(starts), length]`` tokens; a window may cross shards."""
        windows = np.empty((len(starts), length), np.int64)
        for row, start in zip(windows, starts.tolist(), strict=True):
            self.read(start, row)
        return windows

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
