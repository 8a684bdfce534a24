"""Atomic checkpoint directories: complete or absent.

A checkpoint is written under a temporary name, flushed to disk, listed in a manifest of sizes and
checksums, and renamed. The manifest later reveals damage.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from trainer.common.files import checksum, synchronise, write_durably
from trainer.common.formats import Count, read_as
from trainer.runs.ranks import all_gather, on_rank_zero

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Manifest = dict[str, tuple[Count, str]]
"""Sizes and checksums (SHA-256) by the names of files."""
MOST_THREADS = 8
"""Files that one process hashes at once; hashing releases the interpreter's lock."""
_known: dict[tuple[str | int, ...], str] = {}
"""Checksums of the files that this process has hashed or written, by :func:`_identity`."""


def _identity(path: Path) -> tuple[str | int, ...]:
    """Return a key of a file's content that survives a rename of its directory."""
    status = path.stat()
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def digests(directory: Path, pattern: str = "*") -> dict[str, list[int | str]]:
    """Return ``{name: [size, checksum]}`` of the files that match."""
    return {
        path.name: [path.stat().st_size, checksum(path)]
        for path in sorted(directory.glob(pattern))
        if path.is_file() and path.name != MANIFEST
    }


def write_manifest_and_rename(
    partial: Path, final: Path, files: dict[str, list[int | str]]
) -> None:
    """Write the manifest into a complete directory and rename the directory, durably."""
    write_durably(partial / MANIFEST, json.dumps(files, indent=1).encode())
    synchronise(partial)
    if final.exists():  # left by a rewind; a rename cannot replace a directory that has files
        replaced = final.with_name(f".{final.name}.removed")
        final.rename(replaced)
        shutil.rmtree(replaced)
    partial.rename(final)
    synchronise(final.parent)
    # Every rank has hashed its files while it wrote them: they need not be read again.
    _remember(final, [(name, str(digest)) for name, (_, digest) in files.items()])


def damage(directory: Path) -> str | None:
    """Describe damage to a checkpoint's files, or return None; a process hashes each file only
    once."""
    wrong, files = _to_hash(directory)
    return wrong or _difference(directory, files)


def visible_damage(directory: Path) -> str | None:
    """Describe damage that sizes alone reveal, or return None; reads no file."""
    return _to_hash(directory)[0]


def damage_together(directory: Path) -> str | None:
    """Describe damage, as :func:`damage` does, with each rank hashing a share of the files."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong, files = on_rank_zero(lambda: _to_hash(directory))
    if wrong is not None:
        return wrong
    difference = _difference(directory, files[rank::ranks])
    if difference is not None and ranks > 1:
        difference += f", on {os.uname().nodename}"
    wrong = next(filter(None, all_gather(difference)), None)
    if wrong is None:
        _trust(directory)
    return wrong


def _trust(directory: Path) -> None:
    """Remember the files of a sound checkpoint as verified, whichever rank hashed them."""
    try:
        expected = read_as(directory / MANIFEST, Manifest)
        _remember(directory, [(name, digest) for name, (_, digest) in expected.items()])
    except FileNotFoundError:
        log.debug("%s cannot be seen from this node", directory)


def _to_hash(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Return visible damage or None, and the files still to hash with their expected checksums.

    The largest files come first, so that ranks get equal shares.
    """
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
    """Describe the first of ``files`` with a wrong checksum, or return None."""

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
    """Describe how a file differs from its manifest entry without reading it, or return None."""
    path = directory / name
    if name != path.name or name in ("", ".."):
        return f"{MANIFEST} names a file elsewhere ({_shown(name)})"
    if not os.path.isfile(path):  # noqa: PTH113  False also for what can be no name
        return f"{_shown(name)} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _shown(name: str) -> str:
    """Escape a name so that it fits on one line."""
    return name if name.isprintable() and len(name) < 100 else f"{name[:60]!r}..."
