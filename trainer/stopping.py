"""How work that only writes whole files ends: at once by a signal, with nothing temporary left."""

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
    """Let signals end what runs inside as an interrupt does, so that nothing temporary stays.

    Args:
        said: how far the work was, before the name of the signal.
        numbers: the signals.
        first: called when one comes.
        kept: whether the same command goes on from what is there.

    Raises:
        PreemptedError: one came.
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
    """A new directory beside ``final``, whose parent exists, to be written and renamed; it is gone
    at the end, and so are those that killed processes of this machine have left."""
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
    """A name as a pattern that means itself."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def runs(process: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
