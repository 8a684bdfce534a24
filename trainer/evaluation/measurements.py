"""Measurements of a model at one length: held-out loss, retrieval of statements as in the training
text, or any task with prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.data.corpus import HeldOutText
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.evaluation.answering import answers
from trainer.evaluation.loss import token_losses, windows_with_common_ends
from trainer.evaluation.passes import WHOLE, Piece, part_of, sequences_at_once
from trainer.evaluation.scoring import Prompt, Task
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel

Value = tuple[int, str, float]
"""Number of a trial, a metric, and its value."""


class Measurement(ABC):
    """What is measured at any length, in trials of one sequence.

    ``key`` names it in configurations and files, ``title`` in tables. ``metric``: which of the
    values read is reported: ``loss``, or a score from 0 to 1.
    """

    key: str
    title: str
    metric: str

    def sequences(self, length: int) -> int:
        """Return how many sequences of ``length`` tokens are read, about."""
        return len(self.trials(length))

    @abstractmethod
    def fingerprint(self, length: int) -> str:
        """Return a hash of all that is read and expected at ``length`` tokens, with its kind."""

    @abstractmethod
    def trials(self, length: int) -> pd.DataFrame:
        """Return a row for each trial with columns ``text``, ``depth`` and ``label``.

        See :data:`~trainer.evaluation.results.TRIAL_COLUMNS`.
        """

    @abstractmethod
    def read(
        self,
        model: LanguageModel,
        length: int,
        batch_tokens: int,
        reads: int | None = None,
        part: Piece = WHOLE,
    ) -> list[Value]:
        """Measure a part of the trials.

        ``reads``: number of last tokens of a sequence that the model reads (None: every token).
        """


def trial_table(
    count: int,
    texts: Sequence[int] | None = None,
    depths: Sequence[float | None] | None = None,
    labels: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return what :meth:`Measurement.trials` returns; without ``texts`` each trial has its own."""
    return pd.DataFrame(
        {
            "text": range(count) if texts is None else texts,
            "depth": pd.Series([None] * count if depths is None else depths, dtype=float),
            "label": pd.Series([""] * count if labels is None else labels, dtype=object),
        }
    )


@dataclass
class Perplexity(Measurement):
    """Held-out loss on the ``last`` tokens of windows that end at the same places.

    ``windows``: ``[N, length]`` tokens of held-out text for each length.
    """

    windows: dict[int, Integers]
    first_token: int
    last: int
    key: str = PERPLEXITY
    title: str = "Held-out perplexity"
    metric: str = "loss"

    def fingerprint(self, length: int) -> str:
        """Return a hash of the windows and the averaged tokens."""
        return fingerprint(self.key, self.windows[length], self.last, self.first_token)

    def trials(self, length: int) -> pd.DataFrame:
        """Return a trial for each window."""
        return trial_table(len(self.windows[length]))

    def read(
        self,
        model: LanguageModel,
        length: int,
        batch_tokens: int,
        reads: int | None = None,
        part: Piece = WHOLE,
    ) -> list[Value]:
        """Return the mean loss on the last tokens of each window; NaN if it is not finite."""
        windows, size = self.windows[length], max(1, batch_tokens // length)
        values: list[Value] = []
        for first in part_of(range(0, len(windows), size), part):
            batch = windows[first : first + size]
            losses = token_losses(model, batch, self.first_token, batch_tokens, reads=reads)
            means = losses.double()[:, -self.last :].mean(dim=1).tolist()
            finite = (loss if math.isfinite(loss) else math.nan for loss in means)
            values += [(first + i, "loss", loss) for i, loss in enumerate(finite)]
        return values


@dataclass
class Statements(Measurement):
    """Multi-key needles in the words of the demo's training sequences.

    See :mod:`trainer.data.needles`. ``of_length``: the trials of each length.
    """

    of_length: dict[int, Trials]
    first_token: int
    key: str = STATEMENTS
    title: str = "Trained statements (multi-key)"
    metric: str = "score"

    @classmethod
    def make(
        cls,
        held_out: HeldOutText,
        lengths: list[int],
        vocabulary: NeedleVocabulary,
        first_token: int,
        trials: int,
        needles: int,
        seed: int,
        changes: int = 0,
    ) -> Statements:
        """Make trials in windows of held-out text that end at the same tokens at every length."""
        trials_at = {}
        for length, text in windows_with_common_ends(held_out, trials, lengths).items():
            text[:, 0] = first_token
            trials_at[length] = make_trials(
                text, np.arange(trials), vocabulary, needles, seed, changes
            )
        return cls(trials_at, first_token)

    def fingerprint(self, length: int) -> str:
        """Return a hash of the trials."""
        return fingerprint(self.key, self.of_length[length], self.first_token)

    def trials(self, length: int) -> pd.DataFrame:
        """Return the trials with the depths of the requested statements."""
        depths = np.round(1 - self.of_length[length].depths / length, 4)
        return trial_table(len(depths), depths=depths.tolist())

    @torch.no_grad()
    def read(
        self,
        model: LanguageModel,
        length: int,
        batch_tokens: int,
        reads: int | None = None,
        part: Piece = WHOLE,
    ) -> list[Value]:
        """Return 1 for each trial whose answer is the most likely next token, else 0.

        Only the last position goes through the head, and a batch holds at most ``batch_tokens``
        tokens (at least one trial), so memory is linear in the length.
        """
        prompts, expected = self.of_length[length].prompts, self.of_length[length].answers
        if reads is not None and reads < length:
            prompts = prompts[:, -reads:].copy()
            prompts[:, 0] = self.first_token
        size = sequences_at_once(model, prompts.shape[1], batch_tokens)
        values: list[Value] = []
        for first in part_of(range(0, len(prompts), size), part):
            ids = torch.from_numpy(prompts[first : first + size]).to(model.device)
            predicted = model(ids, last=1)[:, -1].argmax(dim=-1).cpu().numpy()
            hits = predicted == expected[first : first + size]
            values += [(first + i, "score", float(hit)) for i, hit in enumerate(hits)]
        return values


@dataclass
class Prompted(Measurement):
    """A task whose prompts are answered in words.

    ``limit``: number of prompts at each length, spread evenly over all of them (None: all).
    """

    task: Task
    tokenizer: Tokenizer
    limit: int | None = None

    def __post_init__(self) -> None:
        self.key, self.title, self.metric = self.task.name, self.task.name, "score"
        # Prompts are equal for all models and methods; keep one length in memory.
        self._prompts = lru_cache(maxsize=1)(self._make_prompts)
        self._summary = cache(self._summarise)

    def _make_prompts(self, length: int) -> list[Prompt]:
        prompts = self.task.prompts(length)
        if self.limit is not None and self.limit < len(prompts):
            places = np.linspace(0, len(prompts) - 1, self.limit).round().astype(int)
            prompts = [prompts[place] for place in places]
        # Four bytes for a token, because the prompts of all tasks are kept in memory together.
        return [replace(p, tokens=array("i", p.tokens)) for p in prompts]

    def fingerprint(self, length: int) -> str:
        """Return a hash of the prompts and their answers."""
        return self._summary(length)[0]

    def trials(self, length: int) -> pd.DataFrame:
        """Return the prompts' depths and labels; those of a group share a text."""
        return self._summary(length)[1]

    def _summarise(self, length: int) -> tuple[str, pd.DataFrame]:
        """Return fingerprint and trials of the prompts, to keep in place of them."""
        prompts = self._prompts(length)
        inputs = [
            (np.array(p.tokens, np.int64), p.answers, p.new_tokens, p.depth, p.label, p.never_first)
            for p in prompts
        ]
        groups = [(i, None) if p.group is None else (None, p.group) for i, p in enumerate(prompts)]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        trials = trial_table(
            len(prompts),
            [numbers[group] for group in groups],
            [p.depth for p in prompts],
            [p.label for p in prompts],
        )
        return fingerprint(self.key, inputs), trials

    def read(
        self,
        model: LanguageModel,
        length: int,
        batch_tokens: int,
        reads: int | None = None,
        part: Piece = WHOLE,
    ) -> list[Value]:
        """Return the score of each answer."""
        prompts = self._prompts(length)
        asked = prompts if reads is None else [_cropped(prompt, reads) for prompt in prompts]
        stop, score = self.task.stop, self.task.score
        texts = answers(model, self.tokenizer, asked, batch_tokens, stop, part)
        return [(i, "score", float(score(text, prompts[i].answers))) for i, text in texts.items()]


def _cropped(prompt: Prompt, reads: int) -> Prompt:
    """Return the prompt's first token and as many of its last ones as leave room for the answer."""
    room = max(1, reads - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)
