"""Text files by address, directory or glob, local or remote."""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import url_to_fs

from trainer.common.errors import Problem, UserError, first_line

KINDS = (".txt", ".jsonl", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
READ = f"{', '.join(KINDS)}, .gz or .zst"
AT_ONCE = 16
"""Addresses that are asked about at once."""


def kind_of(path: str) -> tuple[str, str | None]:
    """Return the suffix that selects a file's reader, and its compression.

    Raises:
        ValueError: the suffix is unknown.
    """
    bare, compression = path, None
    for suffix, name in COMPRESSIONS.items():
        if path.endswith(suffix):
            bare, compression = path.removesuffix(suffix), name
    if bare.endswith(".json") and compression:  # naming of C4 and Dolma
        return ".jsonl", compression
    for kind in KINDS:
        if bare.endswith(kind) and not (compression and kind in (".parquet", ".arrow")):
            return kind, compression
    raise ValueError(path)


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
    found: dict[str, tuple[str, int]] = {}
    problems: list[Problem] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a list may have thousands of addresses
        outcomes = list(pool.map(_attempt, patterns))
    for matched, problem in outcomes:
        if problem:
            problems.append(Problem(key, f"{problem}."))
        for path, size in matched.items():
            try:
                kind_of(path)
            except ValueError:
                problems.append(Problem(key, f"{path!r} is not in {READ}."))
            else:
                if not size:
                    problems.append(Problem(key, f"{path!r} is empty."))
                # One file may be named twice, in two spellings.
                whole = path if "://" in path else str(Path(path).absolute())
                found.setdefault(whole, (path, size))
    if problems:
        raise UserError(*problems)
    root = _common_root(list(found))
    return [File(path, whole[len(root) :], size) for whole, (path, size) in sorted(found.items())]


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
        return {}, f"{pattern!r} names no file in {READ}"
    return {}, f"there is no file {pattern!r}"


def _local(pattern: Path) -> dict[str, int]:
    if pattern.is_dir():  # the directory's name may contain glob characters
        paths = list(_below(pattern))
    elif os.path.lexists(pattern):
        return {str(pattern): _size(pattern)}
    else:
        found = map(Path, glob.glob(str(pattern), recursive=True))  # noqa: PTH207  absolute ones too
        paths = [path for path in found if not path.is_dir()]
    return {str(path): _size(path) for path in paths if _is_read(path.name)}


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
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found.st_size


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
        found = system.find(path, detail=True)
        found = {k: v for k, v in found.items() if not k.rpartition("/")[2].startswith(".")}
    except FileNotFoundError:
        found = system.glob(path, detail=True)
    files = {
        system.unstrip_protocol(name): info["size"]
        for name, info in found.items()
        if info["type"] == "file"
    }
    return {name: size for name, size in files.items() if _is_read(name)}


def _is_read(path: str) -> bool:
    try:
        kind_of(path)
    except ValueError:
        return False
    return True


def _common_root(paths: list[str]) -> str:
    """Return the directory that contains all paths, with its trailing slash."""
    shared = paths[0] if paths else ""
    for path in paths:
        while not path.startswith(shared):
            shared = shared[:-1]
    return shared[: shared.rfind("/") + 1]
