"""Parts of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed

T = TypeVar("T")
COMPLETION = "--shell-completion"
"""The flag whose words are not overrides."""


@dataclass(frozen=True)
class Named(Generic[T]):
    """A request and its name."""

    name: str
    """The option that chose it (``+evaluation=NAME``), or the name of a run."""
    request: T
    words: tuple[str, ...] = ()
    """The overrides that it was read from."""


def reading(schema: str, verbatim: str = "") -> Callable[[Composed], Any]:
    """Return the function that reads a checked request of :mod:`trainer.workflows.requests`.

    ``schema``: name of its class, imported only when words are read, so that help needs none of it.
    ``verbatim``: list of the request that the command's verbatim values are appended to.
    """

    def read(composed: Composed) -> Any:
        from trainer.runs.parsing import parse
        from trainer.workflows import requests

        values = composed.with_verbatim(verbatim) if verbatim else composed.values
        return parse(getattr(requests, schema), values, composed.problems)

    return read


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command of the program."""

    root: str
    """The file of ``conf/`` that its configuration starts from."""
    help: str
    """The first part of its help text."""
    read: Callable[[Composed], T]
    """Returns a checked request, or raises ``UserError`` with all problems."""
    execute: Callable[[T], None]
    """Does the work."""
    single: str = ""
    """Why it has no ``--multirun``, a sentence; empty if it has."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that only it has, with their meanings."""
    verbatim: str = ""
    """A key that may be given several times, each value taken unparsed."""
    bare: bool = False
    """Whether words without ``=`` are values of the verbatim key."""
    completed: Callable[[Composed], Sequence[str]] | None = None
    """Returns the words with those that the command chooses itself, for ``--cfg job``."""
    subject: str = ""
    """The key that one word without ``=`` is the value of."""
    described: tuple[str, ...] = ()
    """Groups that its help describes key by key."""
    output: Callable[[T], str | None] = lambda _: None
    """Returns the directory that only one job may write, if there is one."""
    output_keys: tuple[str, ...] = ()
    """The key of that directory, then keys that it may follow from."""
    together: Callable[[Path], None] | None = None
    """Compares what several jobs wrote, given the directory with their failures."""
    alone: bool = False
    """Whether it refuses several processes of torchrun or srun, of which each would do all the
    work and write the same files."""
    wordless: Callable[[T], str] | None = None
    """Returns the text for a command line without words; None: do the work."""
