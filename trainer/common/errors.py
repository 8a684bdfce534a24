"""Errors that a user can mend, and the end of work on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REQUEUE_EXIT_CODE = 85
"""Exit code of a run that stopped to be resumed: SLURM's ``RequeueExit`` can name it."""


@dataclass(frozen=True)
class Problem:
    """A key and what is wrong with it."""

    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class UserError(ValueError):
    """Something that the user gave is wrong: ``UserError("key: what was expected, got X")``."""

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__("\n".join(map(str, problems)))


class DivergedError(UserError):
    """A run diverged and ends; all ranks raise it together."""


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise a ``UserError`` of the problems, each once, if there are any."""
    if distinct := dict.fromkeys(problems):
        raise UserError(*distinct)


class PreemptedError(Exception):
    """Work that stopped on request: a run at a step boundary, with a checkpoint."""

    def __init__(self, message: str, is_resumable: bool = True, *, requeues: bool = True) -> None:
        self.is_resumable = is_resumable
        """Whether the same command resumes from finished files."""
        self.requeues = requeues
        """Whether the job has to be requeued: not after a SIGTERM, which SLURM or a person sent."""
        super().__init__(message)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
