"""Finished results on disk, the keys that name them, and claims of the processes that share them.

An interrupted evaluation resumes from the store. A key that omits an input would return the wrong
result, so a key contains every field of its request, except those excluded with a reason.

Processes share work through this directory alone. A process claims a job by creating an empty file,
which succeeds in only one process. Faster processes therefore take more jobs, and none is idle
while unclaimed jobs remain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.common.files import write_atomically
from trainer.common.formats import FIRST, check_format, read_plain

log = logging.getLogger(__name__)
Floats = NDArray[np.floating[Any]]

FORMAT = 1
"""Format number of a stored result's file."""
STALE = 86400.0
"""Age in seconds at which the claims of another attempt are removed. Younger ones may belong to
another evaluation that is still running."""
POLL = 0.2
"""Seconds between checks for results of the other processes."""


def all_fields(value: Any, without: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return every field of a dataclass, or every item of a mapping, except those in ``without``.

    ``without``: the reason for excluding each field, all of which a dataclass must have.
    """
    left_out = without or {}
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key not in left_out}
    names = [item.name for item in fields(value)]
    if unknown := sorted(left_out.keys() - {*names}):
        raise ValueError(f"{type(value).__name__} has no field {', '.join(unknown)}")
    return {name: getattr(value, name) for name in names if name not in left_out}


def fingerprint(*parts: Any) -> str:
    """Return a hash of plain values, dataclasses and arrays, sixteen hexadecimal digits.

    Raises:
        TypeError: a value has another type, whose text may not identify it.
    """
    digest = sha256()
    for piece in _pieces(parts):
        digest.update(len(piece).to_bytes(8))  # the length separates ("12", "3") from ("1", "23")
        digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a value, one piece for each nested value."""
    if isinstance(value, np.ndarray):
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield value.tobytes()
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        yield from _pieces(all_fields(value))
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from _pieces(key)
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        raise TypeError(f"no key can be made of {value!r}")


class Store:
    """One JSON file for each result, named by a hash of everything that the result depends on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sound: set[Path] = set()
        self._damaged: set[Path] = set()

    def path(self, kind: str, key: dict[str, Any]) -> Path:
        """Return the path of a result's file."""
        text = json.dumps(key, sort_keys=True, default=str)
        return self.directory / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Return whether the result is stored. Waiting processes call this often."""
        path = self.path(kind, key)
        return path in self._sound or self._stored(path) is not None

    def get(self, kind: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Return the stored JSON value; if it is missing or damaged, compute and store it.

        Raises:
            UserError: the file has a newer format.
        """
        path = self.path(kind, key)
        if (stored := self._stored(path)) is not None:
            check_format(stored[0], FORMAT, "output", repr(str(path)), "choose another output")
            return stored[1]
        value = json.loads(json.dumps(make(), allow_nan=False))
        piece = {"format": FORMAT, "key": key, "value": value, "sha256": _checksum(value)}
        write_atomically(path, json.dumps(piece, default=str) + "\n")
        return value

    def remove(self, kind: str, key: dict[str, Any]) -> None:
        """Delete a result."""
        path = self.path(kind, key)
        path.unlink(missing_ok=True)
        self._sound.discard(path)

    def _stored(self, path: Path) -> tuple[Any, Any] | None:
        """Return the format and value in a file, or None if it is missing or damaged."""
        if not path.is_file():
            return None
        try:
            piece = read_plain(path)
            stored = piece.get("format", FIRST), piece["value"]
            if "sha256" in piece and piece["sha256"] != _checksum(piece["value"]):
                raise ValueError("not what was written")
        except (ValueError, KeyError, TypeError, AttributeError):
            if path not in self._damaged:
                log.warning("%s is damaged; what it held is measured again", path)
                self._damaged.add(path)
            return None
        self._sound.add(path)
        return stored


def pack(values: Floats) -> dict[str, Any]:
    """Encode an array as JSON values, bit for bit."""
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
    return {"type": values.dtype.str, "shape": list(values.shape), "base64": data}


def unpack(packed: dict[str, Any]) -> Floats:
    """Return the array that :func:`pack` was given."""
    data = bytearray(base64.b64decode(packed["base64"]))
    return np.ndarray(packed["shape"], packed["type"], buffer=data)


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Share:
    """Process ``index`` of ``processes`` that evaluate together.

    No part of the work is assigned in advance: a process measures what it claims (:class:`Claims`).
    ``attempt``: equal in all of them, and different at each start, so that a restarted job ignores
    the claims of the one that was killed.
    """

    index: int = 0
    processes: int = 1
    attempt: str = "first"


class Claims:
    """Claims and working times of all processes, in files under ``directory``.

    A single process claims every job and writes no files.
    """

    def __init__(self, directory: Path, share: Share) -> None:
        self.share = share
        self.directory = directory / f"claims-{share.attempt}"
        self._began, self._paused = time.perf_counter(), 0.0
        if share.processes == 1:
            return
        if share.index == 0:
            for older in directory.glob("claims-*"):
                if time.time() - older.stat().st_mtime > STALE:
                    shutil.rmtree(older, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)

    def take(self, *job: Any) -> bool:
        """Claim a job. Return False if another process has claimed it."""
        if self.share.processes == 1:
            return True
        text = json.dumps(job, sort_keys=True, default=str)
        path = self.directory / hashlib.sha256(text.encode()).hexdigest()[:20]
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def pause(self) -> None:
        """Wait briefly for other processes to finish their claimed jobs."""
        time.sleep(POLL)
        self._paused += POLL

    def leave(self) -> None:
        """Write the seconds this process worked. Call it after the last claim."""
        if self.share.processes > 1:
            worked = time.perf_counter() - self._began - self._paused
            write_atomically(self._worked(self.share.index), json.dumps(worked))

    def wait_for_others(self) -> None:
        """Wait until all other processes have stored their results and left.

        Log the idle share of the time, and remove the claims.
        """
        if self.share.processes == 1:
            return
        files = [self._worked(index) for index in range(self.share.processes)]
        wait_for(lambda: sum(not file.is_file() for file in files))
        worked = [float(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        total = time.perf_counter() - self._began
        shutil.rmtree(self.directory, ignore_errors=True)
        log.info(
            "%d processes evaluated for %.1f s and were idle for %.0f%% of it (at work: %s s)",
            len(worked),
            total,
            100 * max(0.0, 1 - sum(worked) / (len(worked) * total)),
            ", ".join(f"{seconds:.1f}" for seconds in worked),
        )

    def _worked(self, index: int) -> Path:
        return self.directory / f"worked-{index}"


def wait_for(missing: Callable[[], int]) -> None:
    """Wait until ``missing`` returns 0, the number of processes still at work.

    There is no time limit: if a process fails, its launcher ends all of them.
    """
    if number := missing():
        log.info("%d of the other processes are still at work", number)
    while missing():
        time.sleep(POLL)
