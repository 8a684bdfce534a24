"""CPU cores that this process may use; a job often has fewer than the machine."""

from __future__ import annotations

import os

MOST_THREADS = 1024
"""With many more, threads cannot be started."""


def core_numbers() -> frozenset[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(core_numbers())


def usual_threads() -> int:
    """Return the default number of CPU threads: ``OMP_NUM_THREADS``, or one per core."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not asked.isdecimal() or not int(asked):
        return cores()
    return min(int(asked), MOST_THREADS)
