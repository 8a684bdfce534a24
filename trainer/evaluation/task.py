"""A task measures a model at one length; a task of prompts scores answers in words.

A function that makes tasks registers itself with :func:`task`, in a file that ``plugins`` names
too; its name is then known to ``evaluation.tasks``.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from trainer.common.registry import Registry
from trainer.evaluation.answering import answers
from trainer.evaluation.answering import batches as batches_of_prompts
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.scoring import Prompt, Score, Stop, check_room
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel

Value = tuple[int, str, float]
"""Number of a trial, the key of a result, and its value."""
Batch = Callable[[], list[Value]]
"""Reads the trials of a batch and returns their values."""


@dataclass(frozen=True, eq=False)
class Task:
    """A measurement at one length; each trial reads one sequence.

    ``titles``: titles of its results in tables, by the keys that name them in files. ``length``: of
    the sequences, in tokens. ``fingerprint``: hash of all that is read and expected. ``trials``: a
    row for each trial, numbered from 0, with those of the columns ``text``, ``depth`` and ``label``
    that they have (see :data:`~trainer.evaluation.results.TRIAL_COLUMNS`); without ``text`` each
    has its own. ``metric``: ``loss``, or ``score`` for values from 0 to 1.

    ``batches``: returns the trials in batches, unread, for a model and the tokens of a forward
    pass; the same in every process, so that values are equal, digit for digit, whoever reads them.
    They leave out what is beyond the ``context`` of the model.
    """

    titles: Mapping[str, str]
    length: int
    fingerprint: str
    trials: pd.DataFrame
    batches: Callable[[LanguageModel, int], list[Batch]]
    metric: str = "score"


@dataclass(frozen=True)
class PromptTask:
    """A kind of question that can be asked at any length, and is answered in words.

    ``prompts``: returns the trials at a length in tokens, prompt and answer together; the same in
    every call. It raises a ``UserError`` if the length is too short for the task, or the text too
    short for the length. ``stop``: whether an answer may end early; None: never. ``never_first``:
    tokens that cannot begin an answer.
    """

    name: str
    tokenizer: Tokenizer
    prompts: Callable[[int], list[Prompt]]
    score: Score
    stop: Stop | None = None
    never_first: tuple[int, ...] = ()

    def at(self, length: int, limit: int = sys.maxsize) -> Task:
        """Return the task at a length, with at most ``limit`` prompts, spread evenly over all;
        raise a UserError if a prompt and its answer are longer."""
        prompts = self.prompts(length)
        longest = max((len(p.tokens) + p.new_tokens for p in prompts), default=0)
        check_room(length - longest, self.name, length)
        prompts = [prompts[place] for place in evenly_spaced(len(prompts), limit)]
        # Four bytes for a token, because the prompts of all tasks are kept in memory together.
        prompts = [replace(p, tokens=array("i", p.tokens)) for p in prompts]
        # A prompt without a group has its own text; groups are numbered from 0.
        groups = [-1 - i if p.group is None else p.group for i, p in enumerate(prompts)]
        columns = {
            "text": pd.factorize(np.array(groups))[0],
            "depth": pd.Series([p.depth for p in prompts], dtype=float),
            "label": [p.label for p in prompts],
        }
        return Task(
            {self.name: self.name},
            length,
            # Values depend on the code of scores, which users may write and mend.
            fingerprint(prompts, self.never_first, self.score, self.stop),
            pd.DataFrame(columns),
            partial(self._batches, prompts),
        )

    def _batches(
        self, prompts: Sequence[Prompt], model: LanguageModel, batch_tokens: int
    ) -> list[Batch]:
        """Return batches of prompts, which read as much as the model can, and their scores."""
        cropped = [_cropped(prompt, model.context or sys.maxsize) for prompt in prompts]

        def read(indices: Sequence[int]) -> list[Value]:
            batch = [cropped[index] for index in indices]
            texts = answers(model, self.tokenizer, batch, batch_tokens, self.stop, self.never_first)
            return [
                (index, self.name, float(self.score(text, prompts[index].answers)))
                for index, text in zip(indices, texts, strict=True)
            ]

        return [
            partial(read, [*chain.from_iterable(groups)])
            for groups in batches_of_prompts(cropped, batch_tokens)
        ]


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return ``count`` of the numbers below ``total``, or all if there are fewer."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def _cropped(prompt: Prompt, context: int) -> Prompt:
    """Return the prompt's first token and as many of its last ones as leave room for the answer in
    ``context`` tokens."""
    room = max(1, context - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)


@dataclass(frozen=True)
class TaskInputs:
    """What tasks are made of: held-out text, ``lengths`` and C in tokens, the most trials of a task
    and length, the settings that the task is registered with, and ``notes`` for the report, to
    which it may add sentences."""

    text: HeldOut
    lengths: Sequence[int]
    training_length: int
    limit: int
    settings: Any = None
    notes: list[str] = field(default_factory=list)

    @property
    def trials(self) -> int:
        """The number of trials that the settings say, or the limit."""
        return min(self.settings.trials, self.limit)


MakeTasks = Callable[[TaskInputs], Sequence[Task | PromptTask]]
"""Returns a task for each length, or prompts that can be asked at any."""


class TaskKind(NamedTuple):
    """Row of :data:`TASKS`: makes tasks, of settings as in :func:`task`."""

    make: MakeTasks
    settings: str | type | None


TASKS = Registry[TaskKind]("task")
"""What :func:`task` registered, by the names of ``evaluation.tasks``."""

M = TypeVar("M", bound=MakeTasks)


def task(name: str, settings: str | type | None = None) -> Callable[[M], M]:
    """Register a function that makes tasks under a name of ``evaluation.tasks``.

    ``settings``: the key below ``evaluation`` whose value it gets, or a class that
    :func:`~trainer.common.fields.configuration` made, whose keys are those of
    ``evaluation.settings.NAME``.
    """

    def register(make: M) -> M:
        TASKS.add(name, TaskKind(make, settings), make)
        return make

    return register
