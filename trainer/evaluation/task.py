"""What can be measured at any length: the interface of every task, and tasks of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from trainer.evaluation.answering import answers
from trainer.evaluation.scoring import Prompt, Score, Stop
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel

Value = tuple[int, str, float]
"""Number of a trial, the key of a result, and its value."""


class Task(ABC):
    """What is measured at any length, in trials of one sequence.

    ``titles``: titles of its results in tables, by the keys that name them in files. ``metric``:
    ``loss``, or ``score`` for values from 0 to 1.
    """

    titles: Mapping[str, str]
    metric: str = "score"

    def sequences(self, length: int) -> int:
        """Return how many sequences of ``length`` tokens are read, about."""
        return len(self.trials(length))

    @abstractmethod
    def fingerprint(self, length: int) -> str:
        """Return a hash of all that is read and expected at ``length`` tokens."""

    @abstractmethod
    def trials(self, length: int) -> pd.DataFrame:
        """Return a row for each trial with columns ``text``, ``depth`` and ``label``.

        See :data:`~trainer.evaluation.results.TRIAL_COLUMNS`.
        """

    @abstractmethod
    def read(
        self, model: LanguageModel, length: int, reads: int, batch_tokens: int, part: slice
    ) -> list[Value]:
        """Return the values of trials of ``length`` tokens.

        ``reads``: number of last tokens of a sequence that the model reads, at most ``length``.
        ``batch_tokens``: of a forward pass. ``part``: the batches to read, such as ``slice(0, None,
        2)``. Batches stay whole, so that trials measured in parts have the same numbers, digit for
        digit, as all at once.
        """


def trial_table(
    count: int,
    texts: Sequence[int] | None = None,
    depths: Sequence[float | None] | None = None,
    labels: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return what :meth:`Task.trials` returns; without ``texts`` each trial has its own."""
    return pd.DataFrame(
        {
            "text": range(count) if texts is None else texts,
            "depth": pd.Series([None] * count if depths is None else depths, dtype=float),
            "label": pd.Series([""] * count if labels is None else labels, dtype=object),
        }
    )


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
        groups = [(i, None) if p.group is None else (None, p.group) for i, p in enumerate(prompts)]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        texts = [numbers[group] for group in groups]
        depths, labels = [p.depth for p in prompts], [p.label for p in prompts]
        trials = trial_table(len(prompts), texts, depths, labels)
        return fingerprint(inputs, self.never_first), trials

    def fingerprint(self, length: int) -> str:
        """Return a hash of the prompts and their answers."""
        return self._summary(length)[0]

    def trials(self, length: int) -> pd.DataFrame:
        """Return the prompts' depths and labels; those of a group share a text."""
        return self._summary(length)[1]

    def read(
        self, model: LanguageModel, length: int, reads: int, batch_tokens: int, part: slice
    ) -> list[Value]:
        """Return the score of each answer."""
        prompts = self._prompts(length)
        asked = prompts if reads == length else [_cropped(prompt, reads) for prompt in prompts]
        options = self.stop, part, self.never_first
        texts = answers(model, self.tokenizer, asked, batch_tokens, *options)
        return [
            (i, self.name, float(self.score(text, prompts[i].answers))) for i, text in texts.items()
        ]


def _cropped(prompt: Prompt, reads: int) -> Prompt:
    """Return the prompt's first token and as many of its last ones as leave room for the answer."""
    room = max(1, reads - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)
