"""Signals and time limits: stop at a step boundary with a checkpoint, so that the run can resume.

SLURM announces preemption with SIGTERM, and the end of a job with the signal of ``--signal``. Both,
like Ctrl-C, only set a flag here. All ranks agree on it without a host sync and act after the same
step. A second signal ends the process immediately, unless it follows within :data:`ECHO` seconds:
schedulers and launchers deliver the same notice in several ways. A second Ctrl-C always does.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from threading import Thread
from types import FrameType
from typing import Any

import lightning as L

from trainer.common.processes import stopping_at_once
from trainer.config import RunConfig
from trainer.runs.ranks import Vote
from trainer.training.callbacks.saving import Saving
from trainer.training.module import LanguageModule, StepCallback

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MARGIN = 120.0
"""Seconds before the end of a SLURM job at which its run stops by itself, or more where its steps,
measurements and checkpoints take long."""

ECHO = 10.0


class Notice:
    """Signal handler; ``signal_name`` is the first signal. A second one ends the process."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._at = 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.signal_name:
            if now - self._at < ECHO and number != signal.SIGINT:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_name, self._at = signal.Signals(number).name, now


@contextmanager
def acknowledging(notice: Notice, speaks: bool = True) -> Iterator[None]:
    """Print at once that a signal came; let a second Ctrl-C end the process at once.

    Handlers in Python wait until the main thread leaves C++, such as a backward pass of many
    seconds. A thread does not: the C handler writes the signal's number to its pipe.

    ``speaks``: whether this process prints, which one of several ranks does.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = Thread(target=_acknowledge, args=(reader, notice, speaks), daemon=True)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")  # closing would not wake the thread: forked workers share the pipe
        thread.join()
        os.close(reader)
        os.close(writer)


SAME_KEY = 0.5
"""Seconds within which Ctrl-C arrives several times: a terminal signals forked workers, too."""


def _acknowledge(reader: int, notice: Notice, speaks: bool) -> None:
    """Read numbers of signals from a pipe until a zero comes."""
    first: float | None = None
    while number := os.read(reader, 1)[0]:
        if signal.getsignal(number) != notice.on_signal:  # training has not begun
            continue
        now = time.monotonic()
        if first is None:
            first = now
            name = signal.Signals(number).name
            more = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            text = f"\n{name}: stopping after the current step, with a checkpoint{more}\n"
            with suppress(OSError):  # not print: the main thread may hold its lock
                os.write(2, text.encode() if speaks else b"")
        elif number == signal.SIGINT and now - first > SAME_KEY:
            os._exit(128 + number)


_process_notice: Notice | None = None
"""Notice of the whole process, within :func:`heeding_signals`."""


@contextmanager
def heeding_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGUSR1 between trainings as well.

    While weights are read or compiled code is discarded, a signal stops the run after its next
    step. A batch script may have left the signals ignored.
    """
    global _process_notice  # noqa: PLW0603
    _process_notice = Notice()
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, _process_notice.on_signal) for number in numbers}
    try:
        yield
    finally:
        _process_notice = None
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping(StepCallback):
    """Stops the run on request; ``reason`` then says why.

    ``request`` is the signal or limit seen on this rank, even during the last step, after which
    nothing stops.
    """

    def __init__(self, config: RunConfig, saving: Saving, start_time: float) -> None:
        self.config, self.saving, self.start_time = config, saving, start_time
        self._step_ends: deque[float] = deque(maxlen=20)
        self.reason: str | None = None
        self.notice = _process_notice or Notice()
        self._limit: str | None = None  # limit that was reached
        self._vote = Vote()

    @property
    def request(self) -> str | None:
        """The signal, or the name of the limit."""
        return self.notice.signal_name or self._limit

    def on_train_start(self, *_: Any) -> None:
        """Install the signal handlers; Lightning's own would act in the middle of a step.

        Lightning restores the previous handlers after training or a failure.
        """
        for number in SIGNALS:
            signal.signal(number, self.notice.on_signal)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save and stop after the step at which all ranks know of the request."""
        if trainer.global_step == self.config.trainer.max_steps:
            return
        self._step_ends.append(time.time())
        if not self._vote.agreed(self._is_asked()):
            return
        self.reason = self.request or "another rank"
        log.warning("Stopping after step %d (%s)", trainer.global_step, self.reason)
        self.saving.save_now(trainer)
        trainer.should_stop = True

    def _is_asked(self) -> bool:
        limit, name = deadline(self.config, self.start_time, self._margin())
        if self.request is None and time.time() > limit:
            self._limit = name
        return self.request is not None

    def _margin(self) -> float:
        """Return the seconds to reserve: two steps and a checkpoint, plus half as much again.

        Disks are slow when all jobs of a cluster end.
        """
        step = max((b - a for a, b in pairwise(self._step_ends)), default=0.0)
        return max(MARGIN, 1.5 * (2 * step + self.saving.seconds))


def deadline(config: RunConfig, start_time: float, margin: float = MARGIN) -> tuple[float, str]:
    """Return when to stop (seconds since the epoch) and the name of the limit.

    ``margin``: seconds before a job's end.
    """
    limits = [(float("inf"), "no limit")]
    if config.trainer.max_time is not None:
        limits.append((start_time + _seconds(config.trainer.max_time), "trainer.max_time"))
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        limits.append((float(end) - margin, "the end of the SLURM job"))
    return min(limits)


def stopping_between_files() -> AbstractContextManager[None]:
    """Stop the program immediately on SIGTERM or SIGUSR1; for work after training.

    Such work only writes files atomically.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    return stopping_at_once("Stopped after training", *numbers)


def _seconds(time: str) -> float:
    """Convert ``hours:minutes:seconds`` to seconds."""
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds
