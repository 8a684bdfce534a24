"""Time spent in the parts of a step, measured without a host sync."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from trainer.runs.metrics_file import PARTS


class StepTimer:
    """Timer of seconds spent in each of :data:`PARTS` since the last reading.

    :meth:`enter` ends the previous part and begins the named one. On a GPU it records events in the
    stream, which are read later, since the host runs ahead.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._gpu = False

    def enter(self, part: str) -> None:
        """Begin ``part``."""
        if not self._marks:  # the device is known only now
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
        """Return the seconds of each part since the last reading."""
        if self._gpu and self._marks:
            last = self._marks[-1][1]
            assert isinstance(last, torch.cuda.Event)
            last.synchronize()
        self._add()
        totals, self._totals = self._totals, dict.fromkeys(PARTS, 0.0)
        return totals
