"""User-facing errors and preemption."""

from collections.abc import Iterable
from difflib import get_close_matches

REQUEUE_EXIT_CODE = 85
"""Exit code of a run that stopped to be resumed: SLURM's ``RequeueExit`` can name it."""
STOP_REASONS = "SIGINT", "SIGTERM", "SIGUSR1", "time limit"
"""Reasons of a stop; of several the first counts."""
ANNOUNCED = "SIGUSR1", "time limit"
"""Reasons after which a SLURM job is requeued: a person or SLURM decides about the others."""


class UserError(ValueError):
    """Something that the user gave is wrong: ``UserError("key: what was expected, got X")``."""


class DivergedError(UserError):
    """A run diverged and ends; all ranks raise it together."""


class PreemptedError(BaseException):
    """Work that stopped on request, which the same command resumes.

    No ``Exception``, so that no library takes it for an error of its own, as some do while they are
    imported. ``reason``: one of :data:`STOP_REASONS`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest of ``known``; empty if none is near."""
    matches = get_close_matches(name, [*known], 1)
    return f"; the nearest is {matches[0]!r}" if matches else ""
