"""Training sequences as views of a token stream: cut from it, or filled with whole documents.

Best fit takes the documents of a shard, longest first, and puts each into the sequence with the
least room that still holds it (best-fit decreasing; Ding et al. 2024, "Fewer Truncations Improve
Language Modeling"). A document longer than a sequence fills whole sequences, and its remainder is
packed. Empty room is padded with end-of-text tokens that do not count in the loss.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.common.locks import locked
from trainer.data.order import Integers
from trainer.data.prepared import Prepared
from trainer.data.shards import FlatFile, FlatWriter, Packing, TableName, TokenStream, read_json


class Blocks(Protocol):
    """Sequences of one length, by index."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        ...

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """Return tokens ``[n, T]`` of these sequences, and how many tokens of each are text
        ``[n]``."""
        ...


@dataclass(frozen=True)
class StreamBlocks:
    """The stream cut every ``length`` tokens; an incomplete last block is omitted."""

    stream: TokenStream
    length: int

    def __len__(self) -> int:
        """Return the number of whole blocks."""
        return len(self.stream) // self.length

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """Return tokens ``[n, T]``; all of each block is text."""
        tokens = self.stream.windows(indices * self.length, self.length)
        return tokens, np.full(len(indices), self.length)


class BestFitBlocks:
    """Sequences of whole documents, read from the tables that :func:`pack` wrote."""

    def __init__(self, text: Prepared, length: int) -> None:
        self.text, self.length = text, length
        tables = _tables(text.directory, length)
        if not tables or (problem := _size_problem(tables)):
            why = f"cannot be read: {problem}" if tables else "are missing"
            raise UserError.at(
                "data.packing",
                f"the blocks of {str(text.directory)!r} for sequences of {length} tokens {why}; "
                "`python -m trainer prepare` makes them.",
            )
        self._tables = tables

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._tables["blocks"].count - 1

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """Return documents one after the other, padded with end-of-text tokens.

        Raises:
            UserError: a table is damaged.
        """
        tokens, pieces = len(self.text.train), self._tables["starts"].count
        sequences = np.full((len(indices), self.length), self.text.end_of_text, np.int64)
        filled = np.zeros(len(indices), np.int64)
        for row, index in enumerate(indices.tolist()):
            first, end = self._tables["blocks"].read(index, 2).tolist()
            if not 0 <= first <= end <= pieces:
                raise self._damaged()
            starts, lengths = (
                self._tables[name].read(first, end - first).tolist()
                for name in ("starts", "lengths")
            )
            for start, size in zip(starts, lengths, strict=True):
                if not 0 < size <= self.length - filled[row] or not 0 <= start <= tokens - size:
                    raise self._damaged()
                self.text.train.read(start, sequences[row, filled[row] : filled[row] + size])
                filled[row] += size
        return sequences, filled

    def _damaged(self) -> UserError:
        return UserError.at(
            "data.packing",
            f"the blocks of {str(self.text.directory)!r} for sequences of {self.length} tokens are "
            f"damaged; remove its best_fit-{self.length}.* and run `python -m trainer prepare`.",
        )


TABLES: dict[TableName, str] = {"starts": "<i8", "lengths": "<i4", "blocks": "<i8"}
"""``blocks[i]`` to ``blocks[i + 1]`` are the pieces of sequence i; each has a start in the stream
and a length."""


def packing_path(directory: Path, length: int, table: str) -> Path:
    """Return the path of one table of the packing for one length."""
    return directory / f"best_fit-{length}.{table}"


def is_packed(directory: Path, length: int) -> bool:
    """Whether the packing for this length is complete."""
    tables = _tables(directory, length)
    return bool(tables) and _size_problem(tables) is None


def packing_problems(directory: Path) -> list[str]:
    """Return a clause for each damaged packing file of a prepared text."""
    problems = []
    for path in sorted(directory.glob("best_fit-*.json")):
        number = path.stem.removeprefix("best_fit-")
        length = int(number) if number.isdecimal() else 0
        tables = _tables(directory, length)
        if not tables:
            problems.append(f"{path.name} is damaged")
        problem = next(filter(None, (table.problem() for table in tables.values())), None)
        problems += [problem] if problem else []
    return problems


def _tables(directory: Path, length: int) -> dict[TableName, FlatFile]:
    """Return the tables as they were written; empty if any table is missing."""
    try:
        tables = read_json(packing_path(directory, length, "json"), Packing).tables
    except (OSError, ValueError):
        return {}
    if tables.keys() != TABLES.keys():
        return {}
    return {
        name: FlatFile(packing_path(directory, length, name), TABLES[name], *astuple(table))
        for name, table in tables.items()
    }


def _size_problem(tables: dict[TableName, FlatFile]) -> str | None:
    return next(filter(None, (table.size_problem() for table in tables.values())), None)


def pack(text: Prepared, length: int) -> None:
    """Compute the best-fit packing for one length and write it atomically beside the shards."""
    lock = text.directory / f".best_fit-{length}.lock"
    with locked(lock, "data", f"packs {str(text.directory)!r}", wait=True):
        for leftover in text.directory.glob(f".best_fit-{length}.*.tmp"):
            leftover.unlink(missing_ok=True)
        if not is_packed(text.directory, length):
            _pack(text, length)


def _pack(text: Prepared, length: int) -> None:
    writers = {name: FlatWriter(packing_path(text.directory, length, name)) for name in TABLES}

    def write(name: TableName, numbers: NDArray[Any]) -> None:
        writers[name].add(numbers.astype(TABLES[name]))

    try:
        write("blocks", np.zeros(1, np.int64))
        offset, pieces = 0, 0
        for place in text.train.places:
            ends = place.ends.read(0, place.shard.documents)
            for starts, lengths in _best_fit(ends, length):
                write("starts", np.concatenate(starts) + offset)
                write("lengths", np.concatenate(lengths))
                of_blocks = pieces + np.cumsum([len(block) for block in starts])
                write("blocks", of_blocks)
                pieces = int(of_blocks[-1])
            offset += place.shard.tokens
        tables = {name: writer.finish() for name, writer in writers.items()}
        path = packing_path(text.directory, length, "json")
        write_atomically(path, json.dumps(asdict(Packing(tables))), durable=True)
    finally:
        for writer in writers.values():
            writer.discard()


def _best_fit(
    ends: NDArray[np.uint32], length: int
) -> Iterator[tuple[list[Integers], list[Integers]]]:
    """Yield the starts and lengths of the pieces of each sequence of one shard."""
    stops = ends.astype(np.int64)
    begins = np.concatenate([[0], stops[:-1]])
    sizes = stops - begins
    whole = sizes // length
    if whole.any():
        owner = np.repeat(np.arange(len(sizes)), whole)
        nth = np.arange(len(owner)) - np.repeat(whole.cumsum() - whole, whole)
        starts = begins[owner] + nth * length
        yield list(starts[:, None]), list(np.full((len(starts), 1), length, np.int64))
    remainders = sizes - whole * length
    order = np.argsort(-remainders, kind="stable")
    order = order[remainders[order] > 0]
    if not len(order):
        return
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms: list[int] = []  # distinct free lengths of open blocks, ascending
    for document, size in zip(order.tolist(), remainders[order].tolist(), strict=True):
        tightest = bisect_left(rooms, size)
        if tightest < len(rooms):
            room = rooms[tightest]
            block = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(tightest)
        else:
            room, block = length, len(blocks)
            blocks.append([])
        blocks[block].append(document)
        if remaining := room - size:
            if not by_room[remaining]:
                insort(rooms, remaining)
            by_room[remaining].append(block)
    starts = begins + whole * length
    yield [starts[block] for block in blocks], [remainders[block] for block in blocks]
