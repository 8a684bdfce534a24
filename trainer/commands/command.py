"""What a command is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed

T = TypeVar("T")


@dataclass(frozen=True)
class Command(Generic[T]):
    """What a command is made of.

    ``root``: the file of ``conf/`` that its configuration starts from. ``help``: what it does, in
    words. ``read``: from a composed configuration to a checked request; raises ``UserError`` with
    all problems. ``execute``: the work. ``alone``: why there is no ``--multirun``, a sentence;
    empty where there is. ``flags``: options of its own. ``described``: groups that its help
    describes key by key. ``place``: the directory that no two jobs may write, where there is one.
    """

    root: str
    help: str
    read: Callable[[Composed], T]
    execute: Callable[[T], None]
    alone: str = ""
    flags: tuple[str, ...] = ()
    described: tuple[str, ...] = ()
    place: Callable[[T], str | None] = lambda _: None
