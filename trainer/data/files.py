"""Files of text by address, directory or glob, on this machine or behind a network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsspec.core import url_to_fs

from trainer.errors import UserError

KINDS = (".txt", ".jsonl", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


AT_ONCE = 16
"""Addresses that are asked about at once."""


def kind_of(path: str) -> tuple[str, str | None]:
    """The suffix that says how a file is read, and its compression.

    Raises:
        ValueError: the name tells no kind that is read.
    """
    bare, compression = path, None
    for suffix, name in COMPRESSIONS.items():
        if path.endswith(suffix):
            bare, compression = path.removesuffix(suffix), name
    if bare.endswith(".json") and compression:  # as C4 and Dolma name theirs
        return ".jsonl", compression
    for kind in KINDS:
        if bare.endswith(kind) and not (compression and kind in (".parquet", ".arrow")):
            return kind, compression
    raise ValueError(path)


def one_line(error: BaseException) -> str:
    """What an error says, without its later lines."""
    said = str(error).strip().splitlines()
    return (said[0] if said else type(error).__name__).rstrip(".")


@dataclass(frozen=True)
class File:
    """A file of a source: its address, its name in a listing, its size in bytes."""

    path: str
    name: str
    size: int

    @property
    def text_bytes(self) -> int:
        """About how much text it holds."""
        suffix = self.path.rpartition(".")[2]
        return int(self.size * {"gz": 3.0, "zst": 3.2, "parquet": 2.0}.get(suffix, 1.0))


def find_files(patterns: list[str], key: str) -> list[File]:
    """The files that addresses, directories and globs name, ordered by name.

    Raises:
        UserError: with every pattern that names nothing, or nothing that is read.
    """
    found: dict[str, int] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a list may have thousands of addresses
        outcomes = list(pool.map(_attempt, patterns))
    for pattern, (matched, problem) in zip(patterns, outcomes, strict=True):
        if problem:
            problems.append(f"{key}: {pattern!r} cannot be read: {problem}.")
        elif not matched:
            problems.append(
                f"{key}: there is no file {pattern!r}."
                if not _many(pattern)
                else f"{key}: {pattern!r} names no file in {', '.join(KINDS)}, .gz or .zst."
            )
        for path, size in matched.items():
            try:
                kind_of(path)
            except ValueError:
                problems.append(f"{key}: {path!r} is not in {', '.join(KINDS)}, .gz or .zst.")
            else:
                if not size:
                    problems.append(f"{key}: {path!r} is empty.")
                found[path] = size
    if problems:
        raise UserError(*problems)
    root = _common_root(list(found))
    return [File(path, path[len(root) :], found[path]) for path in sorted(found)]


def _attempt(pattern: str) -> tuple[dict[str, int], str]:
    """What a pattern names, or why it cannot be told."""
    try:
        return _matching(pattern), ""
    except Exception as error:  # transports raise whatever they like
        return {}, one_line(error)


def _many(pattern: str) -> bool:
    return pattern.endswith("/") or any(c in pattern for c in "*?[")


def _matching(pattern: str) -> dict[str, int]:
    """Sizes by address; of a directory or a glob only files of a kind that is read."""
    system, path = url_to_fs(pattern)
    if pattern.startswith(("http://", "https://")):
        return {pattern: int(system.info(path)["size"] or 0)}
    literal = system.exists(path)  # a name may hold what globs mean
    if literal and not system.isdir(path):
        return {pattern: system.size(path)}
    found = system.find(path, detail=True) if literal else system.glob(path, detail=True)
    files = {
        system.unstrip_protocol(name) if "://" in pattern else name: info["size"]
        for name, info in found.items()
        if info["type"] == "file"
    }
    return {name: size for name, size in files.items() if _is_read(name)}


def _is_read(path: str) -> bool:
    try:
        kind_of(path)
    except ValueError:
        return False
    return not path.rpartition("/")[2].startswith((".", "_"))


def _common_root(paths: list[str]) -> str:
    """The directory that all lie in, with its slash."""
    shared = paths[0] if paths else ""
    for path in paths:
        while not path.startswith(shared):
            shared = shared[:-1]
    return shared[: shared.rfind("/") + 1]
