"""What can be measured at any length: the interface of every task, and tasks of prompts."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from trainer.evaluation.answering import answers
from trainer.evaluation.answering import batches as batches_of_prompts
from trainer.evaluation.scoring import Prompt, Score, Stop
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel

Value = tuple[int, str, float]
"""Number of a trial, the key of a result, and its value."""
Batch = Callable[[], list[Value]]
"""Reads the trials of a batch and returns their values."""


class Task(ABC):
    """What is measured at any length, in trials of one sequence.

    ``titles``: titles of its results in tables, by the keys that name them in files. ``metric``:
    ``loss``, or ``score`` for values from 0 to 1.
    """

    titles: Mapping[str, str]
    metric: str = "score"

    @abstractmethod
    def fingerprint(self, length: int) -> str:
        """Return a hash of all that is read and expected at ``length`` tokens."""

    @abstractmethod
    def trials(self, length: int) -> pd.DataFrame:
        """Return a row for each trial, numbered from 0, with those of the columns ``text``,
        ``depth`` and ``label`` that they have.

        See :data:`~trainer.evaluation.results.TRIAL_COLUMNS`. Without ``text`` each has its own.
        """

    @abstractmethod
    def batches(self, model: LanguageModel, length: int, batch_tokens: int) -> list[Batch]:
        """Return the trials of ``length`` tokens in batches, none of which has been read yet.

        Batches are the same in every process, so that trials have the same values, digit for digit,
        whoever reads a batch and when. They leave out what is beyond the ``context`` of the model.
        ``batch_tokens``: of a forward pass.
        """


@dataclass
class PromptTask(Task):
    """A kind of question that can be asked at any length, and is answered in words.

    ``prompts``: returns the trials at a length in tokens, prompt and answer together; the same in
    every call. It raises a ``UserError`` if the length is too short for the task, or the text too
    short for the length. ``stop``: whether an answer may end early; None: never. ``limit``: number
    of prompts at each length, spread evenly over all of them; None: all. ``never_first``: tokens
    that cannot begin an answer.
    """

    name: str
    tokenizer: Tokenizer
    prompts: Callable[[int], list[Prompt]]
    score: Score
    stop: Stop | None = None
    limit: int | None = None
    never_first: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.titles = {self.name: self.name}
        # Prompts are equal for all models and methods; keep one length in memory.
        self._prompts = lru_cache(maxsize=1)(self._make_prompts)
        self._summary = cache(self._summarise)

    def _make_prompts(self, length: int) -> list[Prompt]:
        prompts = self.prompts(length)
        if self.limit is not None and self.limit < len(prompts):
            places = np.linspace(0, len(prompts) - 1, self.limit).round().astype(int)
            prompts = [prompts[place] for place in places]
        # Four bytes for a token, because the prompts of all tasks are kept in memory together.
        return [replace(p, tokens=array("i", p.tokens)) for p in prompts]

    def _summarise(self, length: int) -> tuple[str, pd.DataFrame]:
        """Return fingerprint and trials of the prompts, to keep in place of them."""
        prompts = self._prompts(length)
        inputs = [
            (np.array(p.tokens, np.int64), p.answers, p.new_tokens, p.depth, p.label)
            for p in prompts
        ]
        # A prompt without a group has its own text; groups are numbered from 0.
        groups = [-1 - i if p.group is None else p.group for i, p in enumerate(prompts)]
        texts = pd.factorize(np.array(groups, int))[0]
        depths, labels = [p.depth for p in prompts], [p.label for p in prompts]
        columns = {"text": texts, "depth": pd.Series(depths, dtype=float), "label": labels}
        # A score of one's own that is mended gives other values.
        rules = [getattr(rule, "func", rule) for rule in (self.score, self.stop) if rule]
        code = [Path(inspect.getfile(rule)).read_text(encoding="utf-8") for rule in rules]
        return fingerprint(inputs, self.never_first, code), pd.DataFrame(columns)

    def fingerprint(self, length: int) -> str:
        """Return a hash of the prompts, their answers, and the files of ``score`` and ``stop``."""
        return self._summary(length)[0]

    def trials(self, length: int) -> pd.DataFrame:
        """Return the prompts' depths and labels; those of a group share a text."""
        return self._summary(length)[1]

    def batches(self, model: LanguageModel, length: int, batch_tokens: int) -> list[Batch]:
        """Return batches of prompts, whose values are the scores of answers."""
        asked = prompts = self._prompts(length)
        if model.context is not None:
            asked = [_cropped(prompt, model.context) for prompt in prompts]

        def read(indices: Sequence[int]) -> list[Value]:
            batch = [asked[index] for index in indices]
            texts = answers(model, self.tokenizer, batch, batch_tokens, self.stop, self.never_first)
            return [
                (index, self.name, float(self.score(text, prompts[index].answers)))
                for index, text in zip(indices, texts, strict=True)
            ]

        return [
            partial(read, [*chain.from_iterable(groups)])
            for groups in batches_of_prompts(asked, batch_tokens)
        ]


def _cropped(prompt: Prompt, context: int) -> Prompt:
    """Return the prompt's first token and as many of its last ones as leave room for the answer."""
    room = max(1, context - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)
