"""Checksums of prepared text, which every machine compares once before it reads the text."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from filelock import FileLock

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.common.processes import cores
from trainer.data.sources import digest

log = logging.getLogger(__name__)

Checksums = dict[str, list[str]]
"""For the name of each file, a checksum of every :data:`PIECE` of its bytes."""
PIECE = 1 << 28
"""Bytes that one thread reads."""
BLOCK = 1 << 20
"""Bytes that a thread holds."""
NOTICEABLE = 1 << 30
"""Bytes of a text that takes seconds to check."""


def checksums(files: Iterable[Path]) -> Checksums:
    """Compute the checksums of files on all cores."""
    pieces: Checksums = {}
    with ThreadPoolExecutor(cores()) as threads:
        for path in files:
            starts = range(0, path.stat().st_size, PIECE)
            pieces[path.name] = [*threads.map(partial(_checksum, path), starts)]
    return pieces


def _checksum(path: Path, start: int) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the piece that begins at ``start``."""
    sha256, left = hashlib.sha256(), PIECE
    with path.open("rb") as file:
        file.seek(start)
        while left and (block := file.read(min(BLOCK, left))):
            sha256.update(block)
            left -= len(block)
    return sha256.hexdigest()[:16]


def check_once(directory: Path, expected: Checksums, cache: Path) -> None:
    """Check a prepared text, unless this machine has checked its files with their sizes and times.

    Other processes of the machine wait meanwhile. Text of older versions has no checksums.

    ``cache``: directory that remembers it, for each machine.

    Raises:
        UserError: a file has other bytes than were prepared.
    """
    directory = directory.resolve()
    stats = [(directory / name).stat() for name in expected]
    size = sum(stat.st_size for stat in stats)
    state = digest([expected, [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
    record = cache / "checked" / platform.node() / digest(str(directory))
    record.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(record.with_suffix(".lock")):
        if record.is_file() and record.read_text("utf-8") == state:
            return
        if not expected:
            log.warning("%s has no checksums: damage to it would pass unnoticed", directory)
        if size > NOTICEABLE:
            log.info("Checking %.1f GB of prepared text in %s", size / 1e9, directory)
        actual = checksums(directory / name for name in expected)
        for name in expected:
            if actual[name] != expected[name]:
                raise UserError(
                    f"{directory / name}: expected the bytes that were prepared, got others; "
                    f"remove {directory} and prepare the text again"
                )
        write_atomically(record, state)
