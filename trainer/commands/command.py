"""What a command is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed

T = TypeVar("T")


@dataclass(frozen=True)
class Named(Generic[T]):
    """A request, with the name of the option it was chosen by (``+evaluation=NAME``), or that of a
    run. ``words``: the overrides that it was read from."""

    name: str
    request: T
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command of the program.

    ``root``: the file of ``conf/`` that its configuration starts from. ``help``: the first part of
    its help text. ``read``: from a composed configuration to a checked request; raises
    ``UserError`` with all problems. ``execute``: does the work. ``single``: why there is no
    ``--multirun``, a sentence; empty where there is. ``flags``: options of its own. ``verbatim``: a
    key that may be given several times, each value taken as it is. ``bare``: whether words that are
    no ``key=value`` are taken as they are instead. ``described``: groups that its
    help describes key by key. ``output``: the directory that a job writes and no other job may,
    where there is one. ``together``: puts what several jobs wrote beside each other, given the
    directory where the jobs have noted their failures. ``wordless``: what to say instead of doing
    the work that a request without a word stands for; None where the work is done.
    """

    root: str
    help: str
    read: Callable[[Composed], T]
    execute: Callable[[T], None]
    single: str = ""
    flags: tuple[str, ...] = ()
    verbatim: str = ""
    bare: bool = False
    described: tuple[str, ...] = ()
    output: Callable[[T], str | None] = lambda _: None
    together: Callable[[Path], None] | None = None
    wordless: Callable[[T], str] | None = None
