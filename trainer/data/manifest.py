"""What stands in the JSON files of prepared text, and whether it does.

A file may be damaged, or come from somebody else: it is read into these types or refused, and the
only names in it that become paths are those of shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from trainer.common.errors import UserError
from trainer.formats import Count, check_format, read_as, read_plain

Split = Literal["train", "validation", "test"]
TableName = Literal["starts", "lengths", "blocks"]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A finished file of ids: ``name`` without suffix, what it holds, and the checksums (SHA-256)
    of it and of its document ends."""

    name: Annotated[str, Field(pattern=r"^(train|validation|test)-\d{5,9}-\d{4,9}$")]
    tokens: Count
    documents: Count
    sha256: Checksum
    ends_sha256: Checksum


@dataclass(frozen=True)
class Piece:
    """What is finished of a unit, and its rows until there, ``bad`` of them malformed, the first of
    which are ``named``; ``last``: the unit is done."""

    rows: Count
    bad: Count
    named: list[str]
    last: bool
    shards: dict[Split, Shard]


@dataclass(frozen=True)
class Manifest:
    """A whole text: what was asked for, what the source was, and every shard in order."""

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
    """A file of a packing: how many numbers it has, and its checksum (SHA-256)."""

    count: Count
    sha256: Checksum


@dataclass(frozen=True)
class Packing:
    """The files of best fit for one length, by name."""

    tables: dict[TableName, Table]


def read_json(path: Path, kind: type[T], newest: int | None = None, what: str = "") -> T:
    """A file as ``kind``; ``newest``: the last format that is read, ``what``: how to call it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged; says where, in one line.
        UserError: it is of another format.
    """
    if newest is not None:
        plain = read_plain(path)
        if not isinstance(plain, dict) or "format" not in plain:
            raise ValueError("it has no format")
        check_format(
            plain["format"], newest, "data", what, "remove the directory to prepare it again"
        )
        if plain["format"] < newest:
            raise UserError.at(
                "data", f"{what} has format {plain['format']}, which is no longer read; remove it."
            )
    return read_as(path, kind)
