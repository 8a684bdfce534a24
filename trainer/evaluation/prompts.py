"""Prompts and scoring of answers: the interface of needle, RULER, LongBench and many-shot tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    """One trial.

    ``tokens``: what the model reads, including the beginning-of-text token. ``answers``: right
    answers. ``new_tokens``: largest length of an answer. ``depth``: position of the (first) needle,
    0 at the beginning of the text and 1 at its end. ``group``: number shared by trials that differ
    only after a common prefix; None: nothing is shared. ``label``: key to average results by, such
    as a category or a length bucket. ``never_first``: tokens that cannot begin an answer.
    """

    tokens: tuple[int, ...]
    answers: tuple[str, ...]
    new_tokens: int
    depth: float | None = None
    group: int | None = None
    label: str = ""
    never_first: tuple[int, ...] = ()


Score = Callable[[str, Sequence[str]], float]
"""What a continuation is worth, 0 to 1, given the right answers."""


Stop = Callable[[str, Sequence[str]], bool]
"""Whether a continuation can end here: what follows makes no difference to its score."""


class Task(Protocol):
    """A kind of question that can be asked at any length.

    ``stop``: whether an answer may end early; None: never.
    """

    @property
    def name(self) -> str: ...

    @property
    def score(self) -> Score: ...

    @property
    def stop(self) -> Stop | None: ...

    def prompts(self, length: int) -> list[Prompt]:
        """Return the trials at ``length`` tokens, prompt and answer together; the same in every
        call.

        Raises:
            UserError: the length is too short for the task, or the text too short for the length.
        """
        ...
