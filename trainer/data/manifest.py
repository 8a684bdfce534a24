"""JSON files of prepared text, checked when they are read.

A file may be damaged or come from someone else. It is parsed into these types or refused, and the
only names in it that become paths are the names of shards.
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


def read_json(path: Path, kind: type[T], newest: int | None = None, what: str = "") -> T:
    """Parse a file as ``kind``; ``newest`` is the newest format supported, ``what`` names the file.

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
            plain["format"], newest, "data", what, "remove the directory to prepare it again"
        )
        if plain["format"] < newest:
            raise UserError.at(
                "data", f"{what} has format {plain['format']}, which is no longer read; remove it."
            )
    return read_as(path, kind)
