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
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trainer.common.errors import UserError, is_transient, os_reason
from trainer.common.files import checksum
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
    """One file of numbers: how many it holds, and its SHA-256 checksum."""

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


@dataclass(frozen=True)
class FlatFile:
    """One file of ``count`` numbers of type ``dtype``, all below ``below`` if it is given.

    The file is read and not memory-mapped. On a network file system, a missing page would fetch
    megabytes, and an unreadable one would kill the process instead of raising an error.
    """

    path: Path
    dtype: str
    count: int
    sha256: str
    below: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the open file: another process opens its own."""
        return {name: value for name, value in vars(self).items() if name != "_file"}

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
                position = start * numbers.itemsize + done
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

    def size_problem(self) -> str | None:
        """Return a clause if the file lacks its expected size, or None."""
        expected = self.count * np.dtype(self.dtype).itemsize
        try:
            actual = self.path.stat().st_size
        except FileNotFoundError:
            return f"{self.path.name} is missing"
        except OSError as error:
            return f"{self.path.name} cannot be read ({os_reason(error)})"
        if actual == expected:
            return None
        return f"{self.path.name} has {actual:,} bytes instead of {expected:,}"

    def problem(self) -> str | None:
        """Return a clause if the file has the wrong size or checksum, or None."""
        if problem := self.size_problem():
            return problem
        try:
            same = checksum(self.path) == self.sha256
        except OSError as error:
            return f"{self.path.name} cannot be read ({os_reason(error)})"
        return None if same else f"{self.path.name} is not what was written"


class FlatWriter:
    """Writer of one file of numbers; only a complete file gets its final name."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        name = f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp"
        self._temporary = path.with_name(name)
        self._file = self._temporary.open("wb")
        self._sum = hashlib.sha256()

    def add(self, numbers: NDArray[Any]) -> None:
        """Append numbers, in their own type."""
        data = numbers.tobytes()
        self._file.write(data)
        self._sum.update(data)
        self.count += len(numbers)

    def finish(self) -> Table:
        """Flush the file to disk and rename it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)
        return Table(self.count, self._sum.hexdigest())

    def discard(self) -> None:
        """Remove the file if it is unfinished."""
        with suppress(OSError):  # closing flushes, which fails on a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardWriter:
    """Writer of the two files of one shard."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.ids, self.ends = (FlatWriter(directory / f"{name}{end}") for end in (".bin", ".ends"))

    def add(self, encoded: Encoded) -> None:
        """Append documents."""
        self.ends.add((self.ids.count + encoded.lengths.cumsum()).astype("<u4"))
        self.ids.add(encoded.ids)

    def finish(self) -> Shard:
        """Complete both files; return the shard."""
        ends, ids = self.ends.finish(), self.ids.finish()
        return Shard(self.name, ids.count, ends.count, ids.sha256, ends.sha256)

    def discard(self) -> None:
        """Remove unfinished files."""
        self.ids.discard()
        self.ends.discard()


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
        path, shard = self.directory / f"{self.shard.name}.bin", self.shard
        return FlatFile(path, self.dtype, shard.tokens, shard.sha256, self.vocabulary)

    @property
    def ends(self) -> FlatFile:
        """File of the ends of its documents, in tokens."""
        path, shard = self.directory / f"{self.shard.name}.ends", self.shard
        return FlatFile(path, "<u4", shard.documents, shard.ends_sha256)

    @property
    def files(self) -> tuple[FlatFile, FlatFile]:
        """Both files."""
        return self.ids, self.ends


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
            ends = place.ends.read(0, place.shard.documents)
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
