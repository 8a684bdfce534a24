"""Atomic file writes, and the text of CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from secrets import randbelow
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path``, creating parent directories.

    A reader sees the old file or the new one, never a part. If the write fails, the old file stays
    and no temporary file is left. Raises ``OSError`` as the file system does.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory: a rename is atomic only within one file system. Process ids are not
    # unique: processes in containers on several machines often have the same one.
    temporary = path.with_name(f".{path.name}.{randbelow(10**12)}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows under their head as CSV, with ``\\n`` as line ends."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
