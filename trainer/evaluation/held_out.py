"""Held-out text of a model, and the tasks on its windows: perplexity and trained statements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from trainer.config import PERPLEXITY, STATEMENTS, NeedleTaskSettings
from trainer.data.corpus import Corpus, HeldOutText, held_out_windows
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.needles import Haystack
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, Value
from trainer.model.language_model import LanguageModel

HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""
UNIGRAM_TOKENS = 2**20
"""Tokens of a text whose frequencies are counted."""


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


def perplexity(text: HeldOut, lengths: Sequence[int], count: int, last: int) -> list[Task]:
    """Return the task of the loss on the ``last`` tokens of windows, at each length.

    There are ``count`` windows, or as many as share no scored token: an interval over windows takes
    these as independent. The windows of all lengths end at the same places, so that their losses
    are paired.

    Raises:
        UserError: the text is shorter than the longest length.
    """
    longest = held_out_windows(text.split, count, max(lengths), apart=last)
    first_token, tasks = text.corpus.first_token, []
    for length in lengths:
        windows = longest[:, -length:]
        task = Task(
            {PERPLEXITY: "Held-out perplexity"},
            length,
            fingerprint(windows, last, first_token),
            pd.DataFrame(index=range(len(windows))),
            partial(_loss_batches, windows, first_token, last),
            metric="loss",
        )
        tasks.append(task)
    return tasks


def _loss_batches(
    windows: Integers, first_token: int, last: int, model: LanguageModel, batch_tokens: int
) -> list[Batch]:
    """Return batches of windows, whose values are the mean losses on their last tokens; NaN if one
    is not finite."""
    size = max(1, batch_tokens // windows.shape[1])

    def read(first: int) -> list[Value]:
        batch = windows[first : first + size]
        losses = token_losses(model, batch, first_token, batch_tokens, reads=model.context)
        means = losses.double()[:, -last:].mean(dim=1).tolist()
        finite = (loss if math.isfinite(loss) else math.nan for loss in means)
        return [(number, PERPLEXITY, loss) for number, loss in enumerate(finite, first)]

    return [partial(read, first) for first in range(0, len(windows), size)]


@torch.no_grad()
def token_losses(
    model: LanguageModel,
    windows: Integers,
    first_token: int,
    batch_tokens: int,
    *,
    reads: int | None = None,
) -> Tensor:
    """Return the loss of every token of windows ``[N, T]``, in nats, float32 on the CPU.

    Every window ``[T]`` follows ``first_token``, as in training, and all its tokens are
    predicted. Memory is linear in the length. A forward pass reads ``batch_tokens`` tokens, or one
    sequence.

    ``reads``: largest number of tokens read to predict one, including the first token (None:
    all before it). The window is then read in pieces of ``reads`` tokens that overlap by half. Only
    the second half of a piece counts, with at least half of ``reads`` tokens before it, and both
    halves of the first piece. The pieces end with the window, so that its last tokens are read
    alike at every length.
    """
    T = windows.shape[1]
    size = min(reads or T, T)
    stride = max(1, size // 2)
    starts = [*range(T - size, 0, -stride), 0]
    cut = sliding_window_view(windows, size, axis=1)[:, starts].reshape(-1, size)
    read = []
    together = model.sequences_at_once(size, batch_tokens)
    for tokens in torch.from_numpy(cut.astype(np.int64)).split(together):
        ids = tokens.roll(1, dims=1)
        ids[:, 0] = first_token
        read.append(model.token_losses(ids.to(model.device), tokens.to(model.device)).cpu())
    pieces = torch.cat(read).view(len(windows), len(starts), size)
    losses = pieces.new_empty(windows.shape)
    for piece, start in reversed([*enumerate(starts)]):
        begin = size - stride if start else 0
        losses[:, start + begin : start + size] = pieces[:, piece, begin:]
    return losses


def statements(text: HeldOut, lengths: Sequence[int], settings: NeedleTaskSettings) -> list[Task]:
    """Return the task at each length: multi-key needles in the words of the demo's training
    sequences.

    See :mod:`trainer.data.needles`. The windows of held-out text end at the same tokens at every
    length.
    """
    vocabulary = NeedleVocabulary.from_tokenizer(text.corpus.tokenizer)
    numbers, first_token, tasks = np.arange(settings.trials), text.corpus.first_token, []
    longest = held_out_windows(text.split, settings.trials, max(lengths))
    for length in lengths:
        windows = longest[:, -length:].copy()
        windows[:, 0] = first_token
        trials = make_trials(
            windows, numbers, vocabulary, settings.needles, settings.seed, settings.changes
        )
        task = Task(
            {STATEMENTS: "Stated numbers found"},
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


def unigram_loss(text: HeldOutText, counted: HeldOutText, vocabulary: int) -> float:
    """Return the loss on ``text``, in nats, of a model that knows only how frequent the tokens of
    ``counted`` are, each of the ``vocabulary`` counted once more."""

    def shares(split: HeldOutText, extra: int) -> NDArray[np.float64]:
        """Return the share of each token, over the parts by their weights."""
        total = np.zeros(vocabulary)
        for weight, ids in split.parts:
            counts = np.bincount(ids[:UNIGRAM_TOKENS], minlength=vocabulary) + extra
            total += weight * counts / max(1, counts.sum())
        return total / total.sum()

    known, wanted = shares(counted, 1), shares(text, 0)
    return float(-(wanted * np.log(known)).sum())
