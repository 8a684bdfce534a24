"""Signals that end work which only writes whole files."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import PreemptedError


@contextmanager
def stopping_at_once(
    said: str, *numbers: signal.Signals, first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let signals end what runs inside as an interrupt does, so that nothing temporary stays.

    Args:
        said: how far the work was, before the name of the signal.
        numbers: the signals.
        first: called when one comes.

    Raises:
        PreemptedError: one came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        first()
        raise PreemptedError(f"{said} ({signal.Signals(number).name}).")

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
