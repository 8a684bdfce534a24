"""Where the time of a step goes, without waiting for the device."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from trainer.runs.metrics_file import PARTS


class StepTimer:
    """Seconds spent in each of :data:`PARTS` since they were last read.

    :meth:`enter` says that the part before has ended and the named one begins. On a GPU these are
    events in its stream, read later, since the host runs ahead of it.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._gpu = False

    def enter(self, part: str) -> None:
        """Begin to count for ``part``."""
        if not self._marks:  # only now it is known which device is used
            self._gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
            return
        self._marks.append((part, time.perf_counter()))
        if len(self._marks) > 1:
            self._add()

    def _add(self) -> None:
        for (part, start), (_, end) in pairwise(self._marks):
            if isinstance(start, float) and isinstance(end, float):
                self._totals[part] += end - start
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                self._totals[part] += start.elapsed_time(end) / 1000
        self._marks = self._marks[-1:]

    def read(self) -> dict[str, float]:
        """Seconds by part since the last reading."""
        if self._gpu and self._marks:
            last = self._marks[-1][1]
            assert isinstance(last, torch.cuda.Event)
            last.synchronize()
        self._add()
        totals, self._totals = self._totals, dict.fromkeys(PARTS, 0.0)
        return totals
