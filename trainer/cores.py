"""The cores of this machine that the process may use; a job often has fewer than there are."""

from __future__ import annotations

import os


def core_numbers() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores() -> int:
    """How many these are."""
    return len(core_numbers())
