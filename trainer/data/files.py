"""Text files by address, directory or glob, local or remote, and the documents in them.

Files are read in pieces, so that memory does not grow with their size. A row without text is
yielded as a :class:`BadRow` with its place; a file that cannot be read is an error.
"""

from __future__ import annotations

import codecs
import errno
import glob
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from trainer.common.errors import Problem, UserError, first_line, raise_all
from trainer.data.config import PIECE

KINDS = (".txt", ".jsonl", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MARKUP = (".md", ".rst")
"""Plain text like ``.txt``; directories and globs name it by its ending, or they would include each
README.md beside data."""
READABLE = f"{', '.join(KINDS)}, .gz or .zst"
"""What directories and globs match."""
AT_ONCE = 16
"""Addresses that are looked up concurrently."""
READ = 1 << 20
"""Bytes read at a time."""
LONGEST = 64 << 20
"""Bytes of the longest line or row that is read; a longer one is malformed."""


def kind_of(path: str) -> tuple[str, str | None]:
    """Return the suffix that selects a file's reader, or "" if it has none, and its compression."""
    bare, compression = _uncompressed(path)
    if bare.endswith(".json") and compression:  # naming of C4 and Dolma
        return ".jsonl", compression
    if bare.endswith(MARKUP):
        return ".txt", compression
    for kind in KINDS:
        if bare.endswith(kind) and not (compression and kind in (".parquet", ".arrow")):
            return kind, compression
    return "", compression


def _uncompressed(path: str) -> tuple[str, str | None]:
    """Return a path without the suffix of its compression, and the compression."""
    for suffix, name in COMPRESSIONS.items():
        if path.endswith(suffix):
            return path.removesuffix(suffix), name
    return path, None


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message; for a missing address, its cause's message."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).rstrip(".")


@dataclass(frozen=True)
class File:
    """One file of a source: its address, its name in a listing, and its size in bytes."""

    path: str
    name: str
    size: int

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of text in the file after decompression."""
        suffix = self.path.rpartition(".")[2]
        return int(self.size * {"gz": 3.0, "zst": 3.2, "parquet": 2.0}.get(suffix, 1.0))


def find_files(patterns: list[str], key: str) -> list[File]:
    """Return the files that addresses, directories and globs name, sorted by name.

    Raises:
        UserError: some patterns match no file, or files of unknown type; names all of them.
    """
    sizes: dict[str, tuple[str, int]] = {}
    problems: list[Problem] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a list may have thousands of addresses
        outcomes = list(pool.map(_attempt, patterns))
    for matched, problem in outcomes:
        if problem:
            problems.append(Problem(key, f"{problem}."))
        for path, size in matched.items():
            if not kind_of(path)[0]:
                problems.append(Problem(key, f"{path!r} is not in {READABLE}, .md or .rst."))
            elif not size:
                problems.append(Problem(key, f"{path!r} is empty."))
            # One file may be named twice, in two spellings.
            whole = path if "://" in path else str(Path(path).absolute())
            sizes.setdefault(whole, (path, size))
    raise_all(problems)
    root = _common_root(list(sizes))
    return [File(path, whole[len(root) :], size) for whole, (path, size) in sorted(sizes.items())]


def _attempt(pattern: str) -> tuple[dict[str, int], str]:
    """Return the size of each file that a pattern matches, or the reason why it matches none.

    Directories and globs match only files whose type can be read.
    """
    try:
        if not pattern:
            return {}, "an empty address names no file"
        matched = _remote(pattern) if "://" in pattern else _local(Path(pattern).expanduser())
    except Exception as error:  # transports raise whatever they like
        why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        where = getattr(error, "filename", None) or pattern
        return {}, f"{str(where)!r} cannot be read: {why}"
    if matched:
        return matched, ""
    if any(c in pattern for c in "*?[") or pattern.endswith("/") or Path(pattern).is_dir():
        return {}, (
            f"{pattern!r} names no file in {READABLE}; .md and .rst are read where a path or glob "
            "ends in them, such as 'texts/*.md'"
        )
    return {}, f"there is no file {pattern!r}"


def _local(pattern: Path) -> dict[str, int]:
    if pattern.is_dir():  # the directory's name may contain glob characters
        paths = list(_below(pattern))
    elif os.path.lexists(pattern):
        return {str(pattern): _size(pattern)}
    else:
        matches = map(Path, glob.glob(str(pattern), recursive=True))  # noqa: PTH207  absolute ones too
        paths = [path for path in matches if not path.is_dir()]
    return {str(path): _size(path) for path in paths if _is_read(path.name, pattern.name)}


def _below(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, except hidden ones; symbolic links are followed.

    Raises:
        OSError: a directory cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for place, below, names in os.walk(directory, onerror=fail, followlinks=True):
        if (real := Path(place).resolve()) in seen:  # a link to one of its parents
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(place) / name for name in names if not name.startswith("."))


def _size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return status.st_size


def _remote(pattern: str) -> dict[str, int]:
    system, path = url_to_fs(pattern)
    if pattern.startswith(("http://", "https://")):
        size = system.info(path)["size"]
        if size is None:
            raise ValueError("the server does not say how large it is; fetch it first")
        return {pattern: int(size)}
    try:
        about = system.info(path)
        if about["type"] == "file":
            return {pattern: about["size"]}
        entries = system.find(path, detail=True)
        entries = {k: v for k, v in entries.items() if not k.rpartition("/")[2].startswith(".")}
    except FileNotFoundError:
        entries = system.glob(path, detail=True)
    files = {
        system.unstrip_protocol(name): info["size"]
        for name, info in entries.items()
        if info["type"] == "file"
    }
    return {name: size for name, size in files.items() if _is_read(name, pattern)}


def _is_read(path: str, pattern: str) -> bool:
    """Whether a directory or glob that matches a file includes it."""
    ends_in_markup = [_uncompressed(name)[0].endswith(MARKUP) for name in (path, pattern)]
    return bool(kind_of(path)[0]) and ends_in_markup != [True, False]


def _common_root(paths: list[str]) -> str:
    """Return the directory that contains all paths, with its trailing slash."""
    shared = paths[0] if paths else ""
    for path in paths:
        while not path.startswith(shared):
            shared = shared[:-1]
    return shared[: shared.rfind("/") + 1]


class UnreachableError(UserError):
    """A file behind a network could not be read; a second attempt may succeed."""


@dataclass(frozen=True)
class BadRow:
    """A row without text: its place and the reason."""

    place: str
    problem: str


def read_rows(
    path: str, text_field: str, piece_characters: int | None = PIECE
) -> Iterator[str | BadRow]:
    """Yield the documents of a file, in order.

    ``piece_characters``: length of the documents that plain text is cut into (None: the file is
    one document).

    Raises:
        UserError: the file cannot be read, or not to its end.
    """
    kind, compression = kind_of(path)
    try:
        with _opened(path, compression) as file:
            if kind == ".txt":
                yield from _documents(file, path, piece_characters)
            elif kind == ".jsonl":
                yield from _json_lines(file, path, text_field)
            else:
                yield from _columns(file, path, kind, text_field)
    except UserError:
        raise
    except Exception as error:  # transports raise whatever they like
        error_type = UnreachableError if "://" in path else UserError
        raise error_type.at(
            "data.files", f"{path!r} cannot be read to its end: {one_line(error)}."
        ) from error


@contextmanager
def _opened(path: str, compression: str | None) -> Iterator[IO[bytes]]:
    with fsspec.open(path, "rb") as raw:
        if compression is None:
            yield raw
        else:
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression) as file:
                yield file


def _documents(file: IO[bytes], path: str, characters: int | None) -> Iterator[str | BadRow]:
    """Split a long text into documents, so that part of a single file can be held out."""
    if characters is None:
        yield _whole(file, path)
        return
    piece = ""
    for line in _text_lines(file, path):
        for start in range(0, len(line), characters):
            if len(piece) >= characters:
                yield piece
                piece = ""
            piece += line[start : start + characters]
    yield piece


def _whole(file: IO[bytes], path: str) -> str | BadRow:
    lines, size = [], 0
    for line in _text_lines(file, path):
        lines.append(line)
        size += len(line)
        if size > LONGEST:
            return BadRow(f"{path!r}", f"is longer than {LONGEST >> 20} MiB as one document")
    return "".join(lines)


def _text_lines(file: IO[bytes], path: str) -> Iterator[str]:
    """Yield lines with their line ends; a very long line comes in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    unfinished, done = "", 0
    while data := file.read(READ):
        if (zero := data.find(b"\0")) >= 0:
            raise UserError.at("data.files", f"{path!r} is not text: byte {done + zero:,} is NUL.")
        text = unfinished + _decoded(decoder, data, path, done)
        *lines, last = text.splitlines(keepends=True) or [""]
        yield from lines
        # The line may continue, even after a carriage return.
        unfinished = last if len(last) < READ else ""
        if not unfinished:
            yield last
        done += len(data)
    text = unfinished + _decoded(decoder, b"", path, done, final=True)
    yield from text.splitlines(keepends=True)


def _decoded(
    decoder: codecs.IncrementalDecoder, data: bytes, path: str, done: int, final: bool = False
) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise UserError.at(
            "data.files", f"{path!r} is not UTF-8 text, at about byte {done + error.start:,}."
        ) from None


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield lines without line ends; None for a line that is too long."""
    unfinished, skipping = b"", False
    while data := file.read(READ):
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            yield None if skipping or len(line) > LONGEST else line
            skipping = False
        if len(unfinished) > LONGEST:
            unfinished, skipping = b"", True
    if unfinished or skipping:
        yield None if skipping else unfinished


def _json_lines(file: IO[bytes], path: str, text_field: str) -> Iterator[str | BadRow]:
    for number, line in enumerate(_lines(file), 1):
        place = f"{path!r} line {number}"
        if line is None:
            yield BadRow(place, f"is longer than {LONGEST >> 20} MiB")
        elif line.strip():
            try:
                yield _text_of(json.loads(line), text_field, place)
            except (ValueError, RecursionError) as error:  # also for text that is not UTF-8
                yield BadRow(place, f"is not JSON ({one_line(error)})")


def whole_characters(text: str) -> str:
    """Replace unpaired surrogates, which JSON can name and UTF-8 cannot hold, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text_of(row: Any, text_field: str, place: str) -> str | BadRow:
    text = row.get(text_field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return whole_characters(text)
    if not isinstance(row, dict):
        return BadRow(place, f"is no object but {json.dumps(row)[:40]}")
    if text_field in row:
        return BadRow(place, f"has no text under {text_field!r} but {json.dumps(text)[:40]}")
    has = ", ".join(map(repr, row)) or "nothing"
    return BadRow(place, f"has no {text_field!r} (data.text_field); it has {has}")


def _columns(file: IO[bytes], path: str, kind: str, text_field: str) -> Iterator[str | BadRow]:
    number = 0
    for batch in _batches(file, path, kind, text_field):
        for value in batch:
            number += 1
            place = f"{path!r} row {number}"
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                yield BadRow(place, "is not UTF-8 text")
                continue
            if not isinstance(text, str):
                yield BadRow(place, f"has no text under {text_field!r} but {str(text)[:40]}")
            elif len(text) > LONGEST:
                yield BadRow(place, f"is longer than {LONGEST >> 20} MiB")
            else:
                yield text


def _batches(file: IO[bytes], path: str, kind: str, text_field: str) -> Iterator[pa.Array]:
    if kind == ".parquet":
        table = pq.ParquetFile(file)
        schema, batches = table.schema_arrow, table.iter_batches(256, columns=[text_field])
    else:
        source = pa.PythonFile(file, mode="r")
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(source)
        schema = reader.schema
    if text_field not in schema.names:
        raise UserError.at(
            "data.text_field",
            f"{path!r} has no field {text_field!r}; it has {', '.join(schema.names)}.",
        )
    for batch in batches:
        yield batch.column(text_field)
