"""Held-out text of a model, and the tasks on its running text: perplexity and statements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch

from trainer.common.errors import UserError
from trainer.config import PERPLEXITY, STATEMENTS, EvaluationConfig, NeedleTaskSettings
from trainer.data.corpus import Corpus, HeldOutText
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.data.tokenizer import own_first_token
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.loss import token_losses, windows_with_common_ends
from trainer.evaluation.needles import Haystack
from trainer.evaluation.passes import part_of, sequences_at_once
from trainer.evaluation.results import counted
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Reading, Task, Value, trial_table

HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out split of a corpus.

    ``split``: its tokens. ``bos_token``: first token of prompts, if any. ``training_share``: share
    of the training sequences with statements (None: unknown).
    """

    corpus: Corpus
    split: HeldOutText
    bos_token: int | None
    training_share: float | None

    @cached_property
    def documents(self) -> list[str]:
        """Documents of the split, at most :data:`HAYSTACK` tokens of them."""
        return self.corpus.documents(self.split, HAYSTACK)

    @cached_property
    def haystack(self) -> Haystack:
        """The documents as a haystack; its tokens are computed once for all tasks."""
        bos = () if self.bos_token is None else (self.bos_token,)
        return Haystack(self.corpus.tokenizer, self.documents, bos, (self.corpus.end_of_text,))

    @property
    def encoder(self) -> Encoder:
        """Encoder of questions, which begin as prompts do."""
        tokenizer = self.corpus.tokenizer
        begins = self.bos_token is not None and own_first_token(tokenizer) is None
        return Encoder(tokenizer, self.corpus.first_token, begins)


@dataclass
class Perplexity(Task):
    """Held-out loss on the ``last`` tokens of windows that end at the same places.

    ``windows``: ``[N, length]`` tokens of held-out text for each length.
    """

    windows: dict[int, Integers]
    first_token: int
    last: int

    metric = "loss"

    def __post_init__(self) -> None:
        self.titles = {PERPLEXITY: "Held-out perplexity"}

    def fingerprint(self, length: int) -> str:
        """Return a hash of the windows and the averaged tokens."""
        return fingerprint(self.windows[length], self.last, self.first_token)

    def trials(self, length: int) -> pd.DataFrame:
        """Return a trial for each window."""
        return trial_table(len(self.windows[length]))

    def read(self, reading: Reading) -> list[Value]:
        """Return the mean loss on the last tokens of each window; NaN if it is not finite."""
        model, length, batch_tokens, reads, part = reading
        windows, size = self.windows[length], max(1, batch_tokens // length)
        values: list[Value] = []
        for first in part_of(range(0, len(windows), size), part):
            batch = windows[first : first + size]
            losses = token_losses(model, batch, self.first_token, batch_tokens, reads=reads)
            means = losses.double()[:, -self.last :].mean(dim=1).tolist()
            finite = (loss if math.isfinite(loss) else math.nan for loss in means)
            values += [(first + i, PERPLEXITY, loss) for i, loss in enumerate(finite)]
        return values


def perplexity(
    text: HeldOut, config: EvaluationConfig, lengths: list[int], last: int
) -> tuple[list[Task], list[str]]:
    """Return the task on the ``last`` tokens of windows, and a sentence if the text has too few."""
    if last > min(lengths):
        raise UserError(f"evaluation.last: expected at most {min(lengths)}, got {last}")
    wanted, longest = config.windows, max(lengths)
    notes: list[str] = []
    windows = windows_with_common_ends(text.split, wanted, lengths, last=last)
    if (count := len(windows[longest])) < wanted:
        notes.append(
            f"Losses are over {counted(count, 'window')}, not {wanted} (evaluation.windows): the "
            f"held-out text of {len(text.split):,} tokens has no more of {longest:,} tokens "
            f"whose last {last:,} do not overlap."
        )
    return [Perplexity(windows, text.corpus.first_token, last)], notes


@dataclass
class Statements(Task):
    """Multi-key needles in the words of the demo's training sequences.

    See :mod:`trainer.data.needles`. ``of_length``: the trials of each length.
    """

    of_length: dict[int, Trials]
    first_token: int

    def __post_init__(self) -> None:
        self.titles = {STATEMENTS: "Trained statements (multi-key)"}

    def fingerprint(self, length: int) -> str:
        """Return a hash of the trials."""
        return fingerprint(self.of_length[length], self.first_token)

    def trials(self, length: int) -> pd.DataFrame:
        """Return the trials with the depths of the requested statements."""
        depths = np.round(1 - self.of_length[length].depths / length, 4)
        return trial_table(len(depths), depths=depths.tolist())

    @torch.no_grad()
    def read(self, reading: Reading) -> list[Value]:
        """Return 1 for each trial whose answer is the most likely next token, else 0.

        Only the last position goes through the head, and a batch holds at most ``batch_tokens``
        tokens (at least one trial), so memory is linear in the length.
        """
        model, trials = reading.model, self.of_length[reading.length]
        prompts = trials.prompts[:, -reading.most :].copy()
        prompts[:, 0] = self.first_token
        size = sequences_at_once(model, prompts.shape[1], reading.batch_tokens)
        values: list[Value] = []
        for first in part_of(range(0, len(prompts), size), reading.part):
            ids = torch.from_numpy(prompts[first : first + size]).to(model.device)
            predicted = model(ids, last=1)[:, -1].argmax(dim=-1).cpu().numpy()
            hits = predicted == trials.answers[first : first + size]
            values += [(first + i, STATEMENTS, float(hit)) for i, hit in enumerate(hits)]
        return values


def statements(
    corpus: Corpus, split: HeldOutText, lengths: list[int], settings: NeedleTaskSettings
) -> Statements:
    """Make trials in windows of held-out text that end at the same tokens at every length."""
    vocabulary, trials = NeedleVocabulary.from_tokenizer(corpus.tokenizer), {}
    numbers = np.arange(settings.trials)
    for length, text in windows_with_common_ends(split, settings.trials, lengths).items():
        text[:, 0] = corpus.first_token
        trials[length] = make_trials(
            text, numbers, vocabulary, settings.needles, settings.seed, settings.changes
        )
    return Statements(trials, corpus.first_token)
