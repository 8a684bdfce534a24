"""Held-out text of a model, and the task of statements in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch

from trainer.config import STATEMENTS, NeedleTaskSettings
from trainer.data.corpus import Corpus, HeldOutText, held_out_windows
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.needles import Haystack
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, Value
from trainer.model.language_model import LanguageModel

HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out split of a corpus.

    ``split``: its tokens. ``bos``: tokens before every prompt. ``training_share``: share
    of the training sequences with statements (None: unknown).
    """

    corpus: Corpus
    split: HeldOutText
    bos: tuple[int, ...]
    training_share: float | None

    @cached_property
    def documents(self) -> list[str]:
        """Documents of the split, at most :data:`HAYSTACK` tokens of them."""
        return self.corpus.documents(self.split, HAYSTACK)

    @cached_property
    def haystack(self) -> Haystack:
        """The documents as a haystack; its tokens are computed once for all tasks."""
        return Haystack(self.encoder, self.documents)

    @property
    def encoder(self) -> Encoder:
        """Encoder of questions, which begin as prompts do."""
        return Encoder(self.corpus.tokenizer, self.bos, self.corpus.first_token)


def statements(
    corpus: Corpus, split: HeldOutText, lengths: list[int], settings: NeedleTaskSettings
) -> list[Task]:
    """Return the task at each length: multi-key needles in the words of the demo's training
    sequences.

    See :mod:`trainer.data.needles`. The windows of held-out text end at the same tokens at every
    length.
    """
    vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)
    numbers, first_token = np.arange(settings.trials), corpus.first_token
    windows, tasks = held_out_windows(split, settings.trials, max(lengths)), []
    for length in lengths:
        text = windows[:, -length:].copy()
        text[:, 0] = first_token
        trials = make_trials(
            text, numbers, vocabulary, settings.needles, settings.seed, settings.changes
        )
        task = Task(
            {STATEMENTS: "Trained statements (multi-key)"},
            length,
            fingerprint(trials, first_token),
            pd.DataFrame({"depth": np.round(1 - trials.depths / length, 4)}),
            partial(statement_batches, trials, first_token),
        )
        tasks.append(task)
    return tasks


def statement_batches(
    trials: Trials, first_token: int, model: LanguageModel, batch_tokens: int
) -> list[Batch]:
    """Return batches of trials, with 1 for each whose answer is the most likely next token, else 0.

    Only the last position goes through the head, and a batch holds at most ``batch_tokens`` tokens
    (at least one trial), so memory is linear in the length.
    """
    prompts = trials.prompts[:, -(model.context or trials.prompts.shape[1]) :].copy()
    prompts[:, 0] = first_token
    size = model.sequences_at_once(prompts.shape[1], batch_tokens)

    @torch.no_grad()
    def read(first: int) -> list[Value]:
        ids = torch.from_numpy(prompts[first : first + size]).to(model.device)
        predicted = model(ids, last=1)[:, -1].argmax(dim=-1).cpu().numpy()
        hits = predicted == trials.answers[first : first + size]
        return [(number, STATEMENTS, float(hit)) for number, hit in enumerate(hits, first)]

    return [partial(read, first) for first in range(0, len(prompts), size)]
