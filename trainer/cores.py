"""The cores of this machine that the process may use; a job often has fewer than there are."""

from __future__ import annotations

import os

MOST_THREADS = 1024
"""With many more, threads cannot be started."""


def core_numbers() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores() -> int:
    """How many these are."""
    return len(core_numbers())


def usual_threads() -> int:
    """CPU threads of a command that is given none: as many as ``OMP_NUM_THREADS`` says, or one for
    each core."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not asked.isdecimal() or not int(asked):
        return cores()
    return min(int(asked), MOST_THREADS)
