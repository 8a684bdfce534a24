"""Immediate stop by a signal, for work that only writes whole files; leaves nothing temporary."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainer.common.errors import PreemptedError


@contextmanager
def stopping_at_once(
    said: str,
    *numbers: signal.Signals,
    first: Callable[[], None] = lambda: None,
    kept: bool = True,
) -> Iterator[None]:
    """Let signals end the block by an exception, so that it removes what is temporary.

    Args:
        said: how far the work was; the name of the signal follows.
        numbers: the signals.
        first: called when a signal comes.
        kept: whether the same command resumes from what is there.

    Raises:
        PreemptedError: a signal came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        first()
        raise PreemptedError(f"{said} ({signal.Signals(number).name}).", kept)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def partial_directory(final: Path) -> Iterator[Path]:
    """Create a directory beside ``final``, to be written and renamed; remove it at the end.

    The parent of ``final`` exists. Directories that killed processes of this machine left are
    removed, too.
    """
    beginning = f".{final.name}.partial-{os.uname().nodename}-"
    for left in final.parent.glob(f".{_plain(final.name)}.partial-*"):
        process = left.name.removeprefix(beginning)
        if left.name.startswith(beginning) and process.isdecimal() and not runs(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    partial = final.with_name(f"{beginning}{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plain(name: str) -> str:
    """Escape a name for ``glob``."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def runs(process: int) -> bool:
    """Return whether a process of this number exists on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
