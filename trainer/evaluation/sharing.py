"""Cells shared out among processes that write into one store; they need not talk to each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL = 1.0
"""Seconds between looks at what the others have stored."""


@dataclass(frozen=True)
class Share:
    """The part of process ``index`` of ``processes``."""

    index: int = 0
    processes: int = 1

    def of(self, pieces: Sequence[T], work: Callable[[T], float]) -> list[T]:
        """The pieces of this process: the largest first, each to whoever has least so far."""
        loads = [0.0] * self.processes
        own = []
        for piece in sorted(pieces, key=work, reverse=True):
            least = loads.index(min(loads))
            loads[least] += work(piece)
            if least == self.index:
                own.append(piece)
        return own


def wait_for(missing: Callable[[], int]) -> None:
    """Return when nothing is ``missing`` any more.

    Without a limit: where a process fails, its launcher ends all of them.
    """
    if number := missing():
        log.info("%d of the others' results are still to come", number)
    while missing():
        time.sleep(POLL)
