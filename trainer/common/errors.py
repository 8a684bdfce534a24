"""Errors that a user can mend: values with a key, text only where they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import ParamSpec, Self

P = ParamSpec("P")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """The key it is about, such as ``trainer.batch_size``, or a path; empty for a whole command."""
    message: str
    """What is wrong and what was expected, as one or more sentences."""
    hint: str = ""
    """The nearest right value, as a sentence."""
    transient: bool = False
    """Whether a second attempt may succeed: a disk or a process failed, not the user."""
    command: str = ""
    """A command that mends it, quoted for a shell; the sentences end before it with a colon."""

    def __str__(self) -> str:
        return f"{self.sentences} {self.command}" if self.command else self.sentences

    @property
    def sentences(self) -> str:
        """Everything but the command."""
        text = f"{self.key}: {self.message}" if self.key else self.message
        return f"{text} {self.hint}" if self.hint else text

    def under(self, prefix: str) -> Problem:
        """Return the same problem for a key inside the group or control ``prefix``."""
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)

    def in_file(self, path: object) -> Problem:
        """Return the same problem for a key in the file at ``path``."""
        return replace(self, key=f"{path}: {self.key}" if self.key else str(path))

    def renamed(self, keys: Mapping[str, str]) -> Problem:
        """Return the same problem under another name of its key or of a group that holds it."""
        for old, new in keys.items():
            if self.key == old or self.key.startswith((f"{old}.", f"{old}[")):
                return replace(self, key=new + self.key[len(old) :])
        return self


class UserError(ValueError):
    """Something that the user gave is wrong: ``UserError("key: what was expected, got X")``."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem("", p) if isinstance(p, str) else p for p in problems)
        super().__init__(*problems)

    @classmethod
    def at(cls, key: str, message: str, hint: str = "", *, transient: bool = False) -> Self:
        """Return the error of a single problem."""
        return cls(Problem(key, message, hint, transient))

    @property
    def is_transient(self) -> bool:
        """Whether a second attempt may succeed."""
        return any(problem.transient for problem in self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class DivergedError(UserError):
    """A run diverged and ends; all ranks raise it together."""


def listed(rules: Callable[P, Iterator[Problem]]) -> Callable[P, list[Problem]]:
    """Make a function that yields problems return them as a list."""

    @wraps(rules)
    def problems(*args: P.args, **kwargs: P.kwargs) -> list[Problem]:
        return list(rules(*args, **kwargs))

    return problems


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise a ``UserError`` of the problems, each once, if there are any."""
    if distinct := dict.fromkeys(problems):
        raise UserError(*distinct)


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ``UserError`` to ``problems`` instead of raising it."""
    try:
        yield
    except UserError as error:
        problems += error.problems


@contextmanager
def renaming(**keys: str) -> Iterator[None]:
    """Report problems of the keys named under the keys that the user gave instead."""
    try:
        yield
    except UserError as error:
        raise UserError(*(problem.renamed(keys) for problem in error.problems)) from error


def disk_problem(error: OSError) -> Problem | None:
    """Return the problem of a full disk or a forbidden directory.

    Returns:
        None for ranks that lost each other, where the traceback helps.
    """
    if error.strerror is None or isinstance(error, ConnectionError | TimeoutError):
        return None
    path = "" if error.filename is None else repr(str(error.filename))
    return Problem(path, f"{error.strerror}.", transient=True)


def is_transient(error: Exception) -> bool:
    """Whether reading a file may succeed the next time: the disk failed. A missing or forbidden
    file, or one with wrong content, is a mistake."""
    mistakes = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError
    return isinstance(error, OSError) and not isinstance(error, mistakes)


REQUEUE_EXIT_CODE = 85
"""Exit code of a run that stopped to be resumed: SLURM's ``RequeueExit`` can name it."""


class PreemptedError(Exception):
    """Work that stopped on request: a run at a step boundary, with a checkpoint."""

    def __init__(self, message: str, is_resumable: bool = True, *, requeues: bool = True) -> None:
        self.is_resumable, self.requeues = is_resumable, requeues
        """Whether the same command resumes from finished files, and whether it requeues its SLURM
        job: not after SIGTERM, which ``scancel`` sends."""
        super().__init__(message)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is spelt most like ``word``, or None if none is close."""
    return next(iter(get_close_matches(word, sorted(set(choices)), n=1, cutoff=0.6)), None)


def near_path(path: Path, pattern: str = "*") -> str:
    """Return a hint with the path beside a missing one whose spelling is nearest, or "".

    For a name alone, runs of that name count too. ``pattern``: glob of the names beside it.
    """
    others = [other for place in _places(path) if place.is_dir() for other in place.glob(pattern)]
    # Names without suffixes have to be alike, too: "missing.txt" is not "bin.txt".
    by_name = {x.name: x for x in reversed(others) if nearest(path.stem, [x.stem])}
    near = nearest(path.name, by_name)
    return "" if near is None else f"Did you mean {str(by_name[near])!r}?"


def looked_for(path: Path, pattern: str = "*") -> str:
    """Return a hint with the directories that lack a missing run, and the nearest path in them."""
    directories = [
        f"{str(place.absolute())!r}{'' if place.is_dir() else ', which does not exist'}"
        for place in _places(path)
    ]
    return f"Looked in {' and '.join(directories)}. {near_path(path, pattern)}".rstrip()


def _places(path: Path) -> list[Path]:
    """Return the directories in which a path is looked for."""
    runs = Path("runs")
    return [path.parent, *([runs] if len(path.parts) == 1 and runs.is_dir() else [])]


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def os_reason(error: OSError) -> str:
    """Return the system's message of an error, or the error's own text if it has none."""
    return error.strerror or first_line(error).rstrip(".")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the nearest right spelling as a hint (``Did you mean 'rope'?``), or all choices."""
    names = sorted(set(choices))
    if (near := nearest(word, names)) is not None:
        return f"Did you mean {near!r}?"
    return f"Choose from: {', '.join(names)}." if names else ""
