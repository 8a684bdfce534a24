"""Files that are written whole or not at all, and their checksums."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import randbelow

from trainer.common.errors import UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path``, creating parent directories.

    A reader sees the old file or the new one, never a part, also after a crash of the machine. If
    the write fails, the old file stays and no temporary file is left.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename is atomic only within one file system, so the directory is the same. Process ids are
    # not unique: processes in containers on several machines often have the same one.
    temporary = path.with_name(f".{path.name}.{randbelow(10**12)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def synchronise(directory: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def expecting(content: str, path: Path | str) -> Iterator[None]:
    """Raise a UserError with the path of a file if a parser of ``content`` fails in the block."""
    try:
        yield
    except Exception as error:  # whatever a parser makes of other bytes
        if isinstance(error, MemoryError | UserError) or getattr(error, "errno", None):
            raise  # it says what is wrong
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: expected {content} ({reason})") from error


def visible_names(directory: Path) -> list[str]:
    """Return the names in a directory that begin with no dot, none if it is missing; raise OSError
    if it cannot be read, where ``Path.glob`` would find nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return [path.name for path in directory.iterdir() if path.name[0] != "."]
    return []


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def partial_directory(final: Path) -> Iterator[Path]:
    """Create a directory beside ``final``, to be written and renamed; remove it at the end."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_is_new(to: Path | str) -> None:
    """Raise a UserError if an export is to be written where something lies."""
    path = Path(to)
    if path.is_file() or (path.exists() and any(path.iterdir())):
        raise UserError(f"to: expected a new or empty directory, got {str(to)!r}")
