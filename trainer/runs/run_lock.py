"""Lock of a run directory: one job at a time trains there, on any node."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from trainer.common.errors import Problem, UserError, os_reason
from trainer.common.locks import try_lock
from trainer.common.processes import is_running

log = logging.getLogger(__name__)

BEAT = 20.0
"""Seconds between signs of life of the process that trains: the time stamp of its lock."""

LEASE = 180.0
"""Seconds without one after which a process on another node counts as dead."""

POLL = 1.0
"""Seconds between looks at the time stamp of another node's process."""


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock.

    ``job``: its SLURM job id, which survives a requeue; ``restarts``: number of requeues.
    """

    process: int
    host: str
    job: str | None
    restarts: str | None = None

    def __str__(self) -> str:
        job = f" (SLURM job {self.job})" if self.job else ""
        return f"process {self.process} of {self.host}{job}"


class RunLock:
    """Lock that lets one process at a time train in a run directory.

    On one machine the system knows whether the holder is alive. Locks of other nodes are
    unreliable: file systems may keep them per node, not at all, or for nodes that are gone.
    Therefore the holder renews the lock's time stamp. A process that finds a recent stamp of
    another node waits up to :data:`LEASE` for the next one, and takes over if none comes. A job
    that SLURM has restarted does not wait for itself.
    """

    def __init__(self) -> None:
        job, restarts = (os.environ.get(f"SLURM_{x}") for x in ("JOB_ID", "RESTART_COUNT"))
        self._me = Holder(os.getpid(), os.uname().nodename, job, restarts)
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._has_waited = False
        self._released = threading.Event()

    def acquire(self, directory: Path) -> None:
        """Lock the directory if it exists and is not locked by this process.

        Raises:
            UserError: another process has locked it.
        """
        path = directory / ".lock"
        if not directory.is_dir() or (self._path == path and path.exists()):
            return
        self.release()
        file = path.open("a+", encoding="utf-8")
        try:
            if problem := self._problem(file, path):
                raise UserError(problem)
            file.truncate(0)
            file.write(json.dumps(asdict(self._me)))
            file.flush()
            os.fsync(file.fileno())  # visible to other nodes
            if self._has_waited:  # as may another process, until the same moment
                time.sleep(POLL)
                if (other := _read(path)) != self._me:
                    raise UserError(_refusal(path, other))
        except BaseException:
            file.close()
            raise
        self._file, self._path, self._released = file, path, threading.Event()
        threading.Thread(target=self._beat, args=(path, self._released), daemon=True).start()

    def release(self) -> None:
        """Release the lock."""
        self._released.set()
        if self._file is not None and self._path is not None:
            if _read(self._path) == self._me:
                self._file.truncate(0)
            self._file.close()
        self._file = self._path = None

    def _problem(self, file: IO[str], path: Path) -> Problem | None:
        """Why this process may not have the lock, or None."""
        self._has_waited = False
        mine, other = try_lock(file), _read(path)
        is_here = other is not None and other.host == self._me.host
        restarted = (  # but not another step of the same allocation
            other is not None
            and other.job is not None
            and other.job == self._me.job
            and other.restarts != self._me.restarts
        )
        age = _now(path) - os.fstat(file.fileno()).st_mtime
        if mine is False:
            free = restarted and not is_here  # held for a node that is gone
        else:
            # Without file locks, check whether the process exists.
            gone = other is not None and is_here and (mine or not is_running(other.process))
            free = other is None or restarted or gone or age >= LEASE
            self._has_waited = not free and not is_here
            if self._has_waited:
                free = _falls_silent(path, other, LEASE - age)
                age = _now(path) - os.fstat(file.fileno()).st_mtime
        if free:
            return None
        sign = "" if mine is False else f" (its last sign of life came {max(age, 0):.0f} s ago)"
        return _refusal(path, other, sign)

    def _beat(self, path: Path, released: threading.Event) -> None:
        while not released.wait(BEAT):
            try:
                if (other := _read(path)) not in (None, self._me):
                    log.error("run_dir: %s has taken over %s; ending", other, path.parent)
                    os._exit(1)  # no further checkpoint
                os.utime(path)
            except OSError as error:
                log.warning("%s cannot be renewed (%s)", path, os_reason(error))


@dataclass(frozen=True)
class Sign:
    """Sign of life of the process that holds a lock. ``age``: seconds since the last one."""

    holder: Holder
    age: float
    is_alive: bool


def last_sign(directory: Path) -> Sign | None:
    """Return the last sign of life of the process that trains in a directory.

    None if no process holds its lock. Reads only, so that the age is by this machine's clock. A
    process on this machine counts as dead if it does not exist, any process if the sign is older
    than :data:`LEASE`.
    """
    path = directory / ".lock"
    if (holder := _read(path)) is None:
        return None
    try:
        age = max(time.time() - path.stat().st_mtime, 0.0)
    except FileNotFoundError:
        return None
    is_here = holder.host == os.uname().nodename
    return Sign(holder, age, age < LEASE and (not is_here or is_running(holder.process)))


def _falls_silent(path: Path, holder: Holder | None, seconds: float) -> bool:
    """Wait for a sign of life of a process on another node.

    Returns whether none comes in time, or the process releases the lock.
    """
    log.info(
        "run_dir: %s held %s a moment ago; waiting up to %.0f s for a sign of life",
        *(holder, path.parent, seconds),
    )
    stamp, end = path.stat().st_mtime_ns, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, POLL))
        if path.stat().st_mtime_ns != stamp:
            if _read(path) is None:
                time.sleep(POLL)  # another process may be writing it
            return _read(path) is None
    return True


def _refusal(path: Path, other: Holder | None, sign: str = "") -> Problem:
    return Problem(
        "run_dir",
        f"{other or 'another process'} is training in {str(path.parent)!r}{sign}; wait "
        "for it, stop it, or choose another name.",
    )


def _read(path: Path) -> Holder | None:
    """Return the holder of a lock; None if there is none or it is just being written."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _now(path: Path) -> float:
    """Return the file system's time, because the clocks of nodes differ."""
    probe = path.with_name(f".lock.{os.getpid()}.tmp")
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
