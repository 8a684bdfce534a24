"""Errors a user can mend: one clear message each, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(Exception):
    """Something the user gave is wrong; ``problems`` holds one complete sentence for each fault."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class TransientError(UserError):
    """What a disk or a lost process did: said as briefly, but it may not happen another time."""


@contextmanager
def said_of(key: str, *named: str) -> Iterator[None]:
    """Within it, what is said of the keys ``named`` is said of ``key``, which the user gave."""
    try:
        yield
    except UserError as error:
        split = (problem.partition(": ") for problem in error.problems)
        said = ((key if first in named else first) + colon + rest for first, colon, rest in split)
        raise type(error)(*said) from error


def kind_of(error: Exception) -> type[UserError]:
    """What an error of reading is to the user: transient where the disk failed; a mistake where the
    file is missing, forbidden or none, or where its content is wrong."""
    mistakes = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError
    transient = isinstance(error, OSError) and not isinstance(error, mistakes)
    return TransientError if transient else UserError


REQUEUE_EXIT_CODE = 85
"""Of a run that stopped to be continued: SLURM's ``RequeueExit`` can name it."""


class PreemptedError(Exception):
    """Work stopped because it was asked to; a run at a step boundary, with a checkpoint. ``kept``:
    whether the same command goes on from what is there."""

    def __init__(self, said: str, kept: bool = True) -> None:
        self.kept = kept
        super().__init__(said)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The nearest right spelling as a clause (`` Did you mean 'rope'?``), or the whole choice."""
    names = sorted(set(choices))
    near = get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Choose from: {', '.join(names)}." if names else ""
