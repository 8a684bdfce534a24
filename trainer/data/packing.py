"""Sequences as views of a stream of tokens: cut from it, or filled with whole documents.

Best fit puts each document, longest first, where the least room is left that holds it, among the
documents of a shard (best-fit decreasing; Ding et al. 2024, "Fewer Truncations Improve Language
Modeling"). A document longer than a sequence fills whole sequences, and its rest is packed. What
stays empty is filled with end-of-text tokens that do not count in the loss.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import Integers
from trainer.data.prepared import Prepared
from trainer.data.shards import TokenStream, synchronise
from trainer.errors import UserError


class Blocks(Protocol):
    """Sequences of one length by number."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """Tokens ``[n, T]`` of these sequences, and how many of each are text ``[n]``."""
        ...


@dataclass(frozen=True)
class StreamBlocks:
    """The stream cut every ``length`` tokens; what does not fill a block at the end is left out."""

    stream: TokenStream
    length: int

    def __len__(self) -> int:
        """Whole blocks."""
        return len(self.stream) // self.length

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """All of every block is text."""
        tokens = self.stream.windows(indices * self.length, self.length)
        return tokens, np.full(len(indices), self.length)


class BestFitBlocks:
    """Sequences of whole documents, as :func:`pack` wrote them down."""

    def __init__(self, text: Prepared, length: int) -> None:
        self.text, self.length = text, length
        len(self)  # what is missing is said now

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: which text, not what is mapped, which they would get copies of."""
        return {"text": self.text, "length": self.length}

    @cached_property
    def _tables(self) -> dict[str, NDArray[Any]]:
        text, length = self.text, self.length
        paths = {name: packing_path(text.directory, length, name) for name in TABLES}
        try:
            return {name: np.memmap(paths[name], dtype=TABLES[name], mode="r") for name in TABLES}
        except (OSError, ValueError) as error:
            raise UserError(
                f"data.packing: the blocks of {str(text.directory)!r} for sequences of {length} "
                f"tokens cannot be read ({error}); `python -m trainer prepare` makes them."
            ) from None

    def __len__(self) -> int:
        """Sequences."""
        return len(self._tables["blocks"]) - 1

    def read(self, indices: Integers) -> tuple[Integers, NDArray[np.int64]]:
        """Documents one after the other, then end-of-text tokens."""
        found = np.full((len(indices), self.length), self.text.end_of_text, np.int64)
        filled = np.zeros(len(indices), np.int64)
        blocks, starts, lengths = (self._tables[name] for name in TABLES)
        for row, index in enumerate(indices.tolist()):
            for piece in range(int(blocks[index]), int(blocks[index + 1])):
                size = int(lengths[piece])
                into = found[row, filled[row] : filled[row] + size]
                self.text.train.read(int(starts[piece]), into)
                filled[row] += size
        return found, filled


TABLES = {"blocks": "<i8", "starts": "<i8", "lengths": "<i4"}
"""``blocks[i]`` to ``blocks[i + 1]`` are the pieces of sequence i; each has a start in the stream
and a length."""


def packing_path(directory: Path, length: int, table: str) -> Path:
    """Where a table of the packing for one length lies."""
    return directory / f"best_fit-{length}.{table}"


def is_packed(directory: Path, length: int) -> bool:
    """Whether best fit has been computed for this length; the last table to appear says so."""
    return packing_path(directory, length, "blocks").is_file()


def pack(text: Prepared, length: int) -> None:
    """Compute best fit for one length and write it beside the shards; nothing is half there."""
    suffix = f".{os.uname().nodename}.{os.getpid()}.tmp"
    names = ["starts", "lengths", "blocks"]
    final = {name: packing_path(text.directory, length, name) for name in names}
    temporary = {name: path.with_name(f".{path.name}{suffix}") for name, path in final.items()}
    files = {name: path.open("wb") for name, path in temporary.items()}
    try:
        files["blocks"].write(np.zeros(1, TABLES["blocks"]).tobytes())
        offset, pieces = 0, 0
        for place in text.train.places:
            for starts, lengths in _best_fit(place.ends, length):
                counts = np.array([len(block) for block in starts])
                flat = np.concatenate(starts) + offset
                files["starts"].write(flat.astype(TABLES["starts"]).tobytes())
                files["lengths"].write(np.concatenate(lengths).astype("<i4").tobytes())
                ends = pieces + counts.cumsum()
                files["blocks"].write(ends.astype(TABLES["blocks"]).tobytes())
                pieces = int(ends[-1])
            offset += place.shard.tokens
        for name in names:
            files[name].flush()
            os.fsync(files[name].fileno())
            files[name].close()
            temporary[name].replace(final[name])
        synchronise(text.directory)
    finally:
        for name in names:
            files[name].close()
            temporary[name].unlink(missing_ok=True)


def _best_fit(
    ends: NDArray[np.uint32], length: int
) -> Iterator[tuple[list[Integers], list[Integers]]]:
    """Starts and lengths of the pieces of every sequence of one shard."""
    stops = ends.astype(np.int64)
    begins = np.concatenate([[0], stops[:-1]])
    sizes = stops - begins
    whole = sizes // length
    if whole.any():
        owner = np.repeat(np.arange(len(sizes)), whole)
        nth = np.arange(len(owner)) - np.repeat(whole.cumsum() - whole, whole)
        starts = begins[owner] + nth * length
        yield (
            list(starts[:, None]),
            list(np.full((len(starts), 1), length, np.int64)),
        )
    rest = sizes - whole * length
    order = np.argsort(-rest, kind="stable")
    order = order[rest[order] > 0]
    if not len(order):
        return
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms: list[int] = []  # those that some block has, ascending
    for document, size in zip(order.tolist(), rest[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            block = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        else:
            room, block = length, len(blocks)
            blocks.append([])
        blocks[block].append(document)
        left = room - size
        if left:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(block)
    starts = begins + whole * length
    yield [starts[block] for block in blocks], [rest[block] for block in blocks]
