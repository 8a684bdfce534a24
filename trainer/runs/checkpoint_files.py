"""Atomic checkpoint directories: complete or absent.

One is written under a temporary name, synchronised to disk, listed in a manifest of sizes and
checksums, and renamed. Damage that comes later is detected by the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(directory: Path, pattern: str = "*") -> dict[str, list[int | str]]:
    """``{name: [size, checksum]}`` of the files that match."""
    return {
        path.name: [path.stat().st_size, checksum(path)]
        for path in sorted(directory.glob(pattern))
        if path.is_file() and path.name != MANIFEST
    }


def publish(partial: Path, final: Path, files: dict[str, list[int | str]]) -> None:
    """Write the manifest into a complete directory and give the directory its name, durably."""
    write_durably(partial / MANIFEST, json.dumps(files, indent=1))
    synchronise(partial)
    if final.exists():  # from before a step back; a rename replaces no directory that has files
        replaced = final.with_name(f".{final.name}.removed")
        final.rename(replaced)
        shutil.rmtree(replaced)
    partial.rename(final)
    synchronise(final.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def synchronise(directory: Path) -> None:
    """Wait until a directory's entries are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        expected = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, RecursionError):
        return f"{MANIFEST} is not JSON"
    if not _is_manifest(expected):
        return f"{MANIFEST} is no list of files with sizes and checksums"
    wrong = (_difference(directory, name, *about) for name, about in expected.items())
    return next(filter(None, wrong), None)


def _is_manifest(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(about, list)
        and len(about) == 2
        and isinstance(about[0], int)
        and isinstance(about[1], str)
        for about in value.values()
    )


def _difference(directory: Path, name: str, size: int, digest: str) -> str | None:
    """How a file differs from its entry in the manifest, or None."""
    path = directory / name
    if name != path.name or name in ("", ".."):
        return f"{MANIFEST} names a file elsewhere ({name})"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None if checksum(path) == digest else f"{name} has changed (its checksum differs)"
