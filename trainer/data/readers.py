"""Values of one column of a file, by its format: text as it stands, in order, nothing guessed."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO

from trainer.common.errors import UserError

LONGEST = 1 << 20
"""Characters of the longest document: merging the tokens of longer ones needs much memory."""
ROWS_AT_ONCE = 64
"""Rows of a table that are read together: a row may be a book."""
LARGEST_CELL = (1 << 31) - 1
"""Characters of the largest cell of a csv file."""
UNREADABLE = OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, lzma.LZMAError
"""Errors of files that are damaged or hold something else."""

Rows = Iterator[tuple[int, Any]]
"""Values of a column (None: nothing), each with the number of lines that end with it; lines of a
table or of a JSON list are its rows."""


def read_column(path: str, column: str) -> Iterator[str | None]:
    """Yield the texts of a column of a file, here or at an address; raise a UserError if the file
    is damaged, is no UTF-8, or has a row without a text."""
    suffix = format_of(path)
    if suffix is None:
        raise UserError(f"data.files: {path}: expected {', '.join(READERS)}")
    read = READERS[suffix]
    lines = 0
    try:
        with _opened(path) as file:
            for number, value in read(file, column):
                yield as_text(value, column)
                lines = number
    except UnicodeEncodeError as error:
        line = lines + 1
        if read is _read_text:  # a value has many lines
            line += error.object.count("\n", 0, error.start)
        raise UserError(f"data.files: {path}: line {line}: expected UTF-8") from error
    except UNREADABLE as error:
        raise UserError(f"data.files: {path}: line {lines + 1}: {error}") from error


def format_of(path: str) -> str | None:
    """Return the suffix that names the format of a file, or None if no reader has it."""
    file = PurePosixPath(without_query(path).lower())
    suffixes = [s for s in file.suffixes if s not in DECOMPRESSORS]
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def without_query(path: str) -> str:
    """Return a path as it is, or an address of the web without what follows its ``?``."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def as_text(value: Any, column: str) -> str | None:
    """Return the text of a row, or None if it has none.

    Raises:
        UnicodeEncodeError: it holds surrogates: bytes that are no UTF-8, or halves of a character.
        ValueError: it is no text.
    """
    if value is None:
        return None
    if isinstance(value, list):
        raise ValueError(f"{column}: expected text, got a list; write each chat as one text")
    if not isinstance(value, str):
        raise ValueError(f"{column}: expected text, got {value!r:.60}")
    value.encode()
    return value


def _zst(file: BinaryIO) -> Any:
    """Decompress Zstandard; unlike the package ``zstandard``, Arrow reports a cut file."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".zst": _zst,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""Decompressors by the last suffix of a file."""


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file."""
    decompress = DECOMPRESSORS.get(PurePosixPath(without_query(path).lower()).suffix)
    with _raw(path) as raw:
        if decompress is None:
            yield raw
            return
        if "://" not in path and Path(path).stat().st_size == 0:
            raise EOFError("expected a compressed file, got no bytes")
        with decompress(raw) as file:
            yield file


def _raw(path: str) -> BinaryIO:
    """Open the bytes of a file; one at an address is read on after a disconnection."""
    if "://" not in path:
        return Path(path).open("rb")
    from datasets.utils.file_utils import xopen

    return xopen(path, "rb")


def _decoded(file: BinaryIO, newline: str | None = "\n") -> TextIO:
    """Decode UTF-8. Other bytes become surrogates, which :func:`as_text` finds in a text."""
    return io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline)


def _read_text(file: BinaryIO, _: str) -> Rows:
    """Read a file of text as a whole; a long one is cut, at line ends if lines are short."""
    decoded = _decoded(file, newline=None)
    lines = 0
    while True:
        text = decoded.read(LONGEST - 1024) + decoded.readline(1024)
        if not text:
            return
        lines += text.count("\n")
        yield lines, text


def _read_json(file: BinaryIO, column: str) -> Rows:
    """Read an object a line, or one list of objects."""
    decoded = _decoded(file)
    is_first = True
    for number, line in enumerate(decoded, start=1):
        if not line.strip():
            yield number, None
        elif is_first and line.lstrip().startswith("["):
            for entry, row in enumerate(_parsed(line + decoded.read()), start=number):
                yield entry, _field(row, column)
        else:
            is_first = False
            yield number, _field(_parsed(line.rstrip()), column)


def _parsed(text: str) -> Any:
    """Parse JSON; an error says its place in ``text``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        text.encode()  # raises for bytes that are not UTF-8, which explain the error
        place = f"column {error.colno}"
        if error.lineno > 1:  # of a list
            place = f"line {error.lineno} of the list, {place}"
        raise ValueError(f"{error.msg} at {place}") from error


def _field(row: Any, column: str) -> Any:
    """Return the value of a column of a JSON object."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {row!r:.60}")
    if column not in row:
        raise ValueError(f"expected a field {column!r}, got {list(row)!r:.200}")
    return row[column]


def _read_csv(file: BinaryIO, column: str) -> Rows:
    """Read cells between commas, in double quotes where they contain commas, quotes or line ends.

    Rows may lack empty cells at their end, as Excel writes them.
    """
    return _cells(csv.reader(_decoded(file), strict=True), column)


def _read_tsv(file: BinaryIO, column: str) -> Rows:
    """Read cells between tabs; quotes are text, and every row has all cells."""
    rows = csv.reader(_decoded(file), delimiter="\t", quoting=csv.QUOTE_NONE)
    return _cells(rows, column, is_complete=True)


def _cells(rows: Any, column: str, is_complete: bool = False) -> Rows:
    """Yield the cells of a column of a ``csv.reader``, whose first row names the columns.

    A longer row is a broken one, unless what it has too much is empty. ``is_complete``: a shorter
    row is broken, too, not only one without this column.
    """
    csv.field_size_limit(LARGEST_CELL)
    names: list[str] = next(rows, [])
    index = _index(names, column)
    least = len(names) if is_complete else index + 1
    yield rows.line_num, None
    for row in rows:
        if not row:  # an empty line
            yield rows.line_num, None
            continue
        if len(row) < least or any(row[len(names) :]):
            raise ValueError(f"expected {len(names)} cells, got {len(row)}")
        yield rows.line_num, row[index]


def _index(names: list[str], column: str) -> int:
    """Return the place of a column, whose name must be unique."""
    if names.count(column) != 1:
        raise ValueError(f"expected one column {column!r}, got {names!r:.200}")
    return names.index(column)


def _read_parquet(file: BinaryIO, column: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file)
    _index(table.schema_arrow.names, column)
    return _values(table.iter_batches(ROWS_AT_ONCE, columns=[column]), column)


def _read_arrow(file: BinaryIO, column: str) -> Rows:
    """Read Arrow's format of streams, which `datasets` saves, or its format of files."""
    from pyarrow import ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        table = ipc.open_file(file)
        batches = (table.get_batch(i) for i in range(table.num_record_batches))
    else:
        table = batches = ipc.open_stream(file)
    _index(table.schema.names, column)
    return _values(batches, column)


def _values(batches: Iterable[Any], column: str) -> Rows:
    rows = 0
    for batch in batches:
        values = batch.column(column)
        for start in range(0, len(values), ROWS_AT_ONCE):
            for value in values.slice(start, ROWS_AT_ONCE).to_pylist():
                rows += 1
                yield rows, value


READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    **dict.fromkeys((".txt", ".md", ".rst"), _read_text),
    **dict.fromkeys((".jsonl", ".json"), _read_json),
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""Readers by the suffix of a file."""
