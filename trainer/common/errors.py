"""Errors that a user can mend, and the end of work on request."""

from __future__ import annotations

REQUEUE_EXIT_CODE = 85
"""Exit code of a run that stopped to be resumed: SLURM's ``RequeueExit`` can name it."""


class UserError(ValueError):
    """Something that the user gave is wrong: ``UserError("key: what was expected, got X")``."""


class DivergedError(UserError):
    """A run diverged and ends; all ranks raise it together."""


class PreemptedError(Exception):
    """Work that stopped on request, which the same command resumes.

    ``reason``: name of the signal, "time limit" or "another rank".
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
