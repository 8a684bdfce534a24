"""Atomic checkpoint directories: complete or absent.

One is written under a temporary name, synchronised to disk, listed in a manifest of sizes and
checksums, and renamed. Damage that comes later is detected by the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from trainer.formats import Count, read_as
from trainer.runs.ranks import all_gather, on_rank_zero

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Manifest = dict[str, tuple[Count, str]]
"""Sizes and checksums (SHA-256) by the names of files."""
MOST_THREADS = 8
"""Files that one process hashes at once; hashing releases the interpreter's lock."""
_known: dict[tuple[str | int, ...], str] = {}
"""Checksums of files by :func:`_identity`: what this process has hashed, or written, once."""


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> tuple[str | int, ...]:
    """What a file keeps when its directory is renamed, and loses when its content changes."""
    about = path.stat()
    return path.name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


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
    # All ranks hashed what they had just written: the report need not read it again.
    _remember(final, [(name, str(digest)) for name, (_, digest) in files.items()])


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
    """What is wrong with a checkpoint's files, or None; no file is hashed twice in a process."""
    wrong, files = _to_hash(directory)
    return wrong or _difference(directory, files)


def visible_damage(directory: Path) -> str | None:
    """As :func:`damage`, by what is seen without reading the files: their sizes."""
    return _to_hash(directory)[0]


def damage_together(directory: Path) -> str | None:
    """As :func:`damage`, by all ranks together: each hashes its share, and all know the outcome."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong, files = on_rank_zero(lambda: _to_hash(directory))
    if wrong is not None:
        return wrong
    found = _difference(directory, files[rank::ranks])
    if found is not None and ranks > 1:
        found += f", on {os.uname().nodename}"
    wrong = next(filter(None, all_gather(found)), None)
    if wrong is None:
        _trust(directory)
    return wrong


def _trust(directory: Path) -> None:
    """Know all files of a sound checkpoint, whoever has hashed them, where this process sees it."""
    try:
        expected = read_as(directory / MANIFEST, Manifest)
        _remember(directory, [(name, digest) for name, (_, digest) in expected.items()])
    except FileNotFoundError:
        log.debug("%s is not to be seen from here", directory)


def _to_hash(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """What is seen to be wrong without reading the files, or None; and those that must be read,
    with the checksums they should have: the largest first, so that ranks get equal shares."""
    try:
        expected = read_as(directory / MANIFEST, Manifest)
    except FileNotFoundError:
        return f"{MANIFEST} is missing", []
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is no list of files with sizes and checksums ({error})", []
    if not expected:
        return f"{MANIFEST} lists no files", []
    for name, (size, _) in expected.items():
        if (wrong := _visible_difference(directory, name, size)) is not None:
            return wrong, []
    by_size = sorted(expected, key=lambda name: expected[name][0], reverse=True)
    files = [(name, expected[name][1]) for name in by_size]
    return None, [(n, d) for n, d in files if _known.get(_identity(directory / n)) != d]


def _difference(directory: Path, files: list[tuple[str, str]]) -> str | None:
    """The first of ``files`` whose content is not what its checksum says, or None."""

    def look(file: tuple[str, str]) -> str | None:
        name, digest = file
        try:
            before = _identity(directory / name)
            if checksum(directory / name) != digest:
                return f"{name} has changed (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        _known[before] = digest
        return None

    with ThreadPoolExecutor(MOST_THREADS) as pool:
        return next(filter(None, pool.map(look, files)), None)


def _remember(directory: Path, files: list[tuple[str, str]]) -> None:
    _known.update({_identity(directory / name): digest for name, digest in files})


def _visible_difference(directory: Path, name: str, size: int) -> str | None:
    """How a file differs from its entry in the manifest without being read, or None."""
    path = directory / name
    if name != path.name or name in ("", ".."):
        return f"{MANIFEST} names a file elsewhere ({_shown(name)})"
    if not os.path.isfile(path):  # noqa: PTH113  False also for what can be no name
        return f"{_shown(name)} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _shown(name: str) -> str:
    """A name as a line can hold it."""
    return name if name.isprintable() and len(name) < 100 else f"{name[:60]!r}..."
