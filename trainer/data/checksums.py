"""Checksums of prepared text and of published models, which every machine computes once."""

import hashlib
import json
import logging
import platform
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

from filelock import FileLock

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import write_atomically
from trainer.common.processes import cores
from trainer.data.sources import digest

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)

Checksums = dict[str, list[str]]
"""For the name of each file, a checksum of every :data:`PIECE` of its bytes."""
PIECE = 1 << 28
"""Bytes that one thread reads."""
BLOCK = 1 << 20
"""Bytes that a thread holds."""
NOTICEABLE = 1 << 30
"""Bytes that take seconds to read."""


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
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for left in range(PIECE, 0, -BLOCK):
            sha256.update(file.read(min(BLOCK, left)))
    return sha256.hexdigest()[:16]


def checksums_once(directory: Path, names: Sequence[str], cache: Path) -> Checksums:
    """Return the checksums of files of a directory, which one process of a machine computes while
    the others wait, and again only if their sizes or times have changed.

    ``cache``: directory that remembers them; if it cannot be written, every process reads.
    """
    directory = directory.resolve()
    paths = [directory / name for name in names]
    stats = [path.stat() for path in paths]
    size = sum(stat.st_size for stat in stats)
    state = digest([[*names], [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
    record = cache / "checksums" / platform.node() / digest(str(directory))
    with ExitStack() as lock:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(FileLock(record.with_suffix(".lock")))
        with suppress(OSError, ValueError):  # it is missing, or damaged
            of_state, known = adapter(tuple[str, Checksums]).validate_json(record.read_bytes())
            if of_state == state:
                return known
        if size > NOTICEABLE:
            log.info("Reading %.1f GB in %s for its checksums", size / 1e9, directory)
        actual = checksums(paths)
        with suppress(OSError):
            write_atomically(record, json.dumps([state, actual]))
    return actual


def check_once(directory: Path, expected: Checksums, cache: Path) -> None:
    """Check a prepared text, see :func:`checksums_once`; raise a UserError if a file has other
    bytes than were prepared. Text of older versions has no checksums."""
    if not expected:
        _warn_once("%s has no checksums: damage to it would pass unnoticed", directory)
    actual = checksums_once(directory, [*expected], cache)
    for name in expected:
        if actual[name] != expected[name]:
            raise UserError(
                f"{directory / name}: expected the bytes that were prepared, got others; "
                f"remove {directory} and prepare the text again"
            )
