"""Work shared among processes through a directory that all of them see; they exchange no messages.

A process claims a job by creating an empty file, which succeeds for one of them only. So a process
that is faster, or has got shorter jobs, takes more of them, and none waits while jobs are left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically

log = logging.getLogger(__name__)

STALE = 86400.0
"""Seconds without a claim after which those of another attempt are removed. It may be another
evaluation that still goes on."""
POLL = 0.2
"""Seconds between looks at what the other processes have stored."""


@dataclass(frozen=True)
class Share:
    """Process ``index`` of ``processes`` that evaluate together.

    ``attempt``: the same text in all of them, another one each time they are started. Claims of a
    job that was killed then mean nothing to the next.
    """

    index: int = 0
    processes: int = 1
    attempt: str = "first"


class Claims:
    """Claims of all processes in ``directory``, and how long each of them worked.

    One process alone claims nothing and writes nothing.
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
        """Claim a job. Return whether it is this process's now: False if another has claimed it."""
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
        """Wait a moment for what other processes have claimed."""
        time.sleep(POLL)
        self._paused += POLL

    def leave(self) -> None:
        """Store how many seconds this process was at work. It claims nothing afterwards."""
        if self.share.processes > 1:
            worked = time.perf_counter() - self._began - self._paused
            write_atomically(self._worked(self.share.index), json.dumps(worked))

    def wait_for_others(self) -> None:
        """Return when the other processes have left: each has then stored what it claimed. Log
        which share of the time the processes were idle, and remove the claims."""
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
            100 * idle_share(worked, total),
            ", ".join(f"{one:.1f}" for one in worked),
        )

    def _worked(self, index: int) -> Path:
        return self.directory / f"worked-{index}"


def idle_share(worked: list[float], seconds: float) -> float:
    """Return the share of ``seconds`` in which processes had nothing to do; ``worked``: the seconds
    that each was at work."""
    return max(0.0, 1 - sum(worked) / (len(worked) * max(seconds, 1e-9)))


def wait_for(missing: Callable[[], int]) -> None:
    """Return when no process is ``missing`` any more.

    Without a limit: where a process fails, its launcher ends all of them.
    """
    if number := missing():
        log.info("%d of the other processes are still at work", number)
    while missing():
        time.sleep(POLL)
