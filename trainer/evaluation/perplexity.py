"""The task of the loss on the last tokens of held-out windows."""

import math
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.corpus import HeldOutText, held_out_windows
from trainer.data.order import Integers
from trainer.evaluation.results import PERPLEXITY, counted
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, TaskInputs, Value, task
from trainer.model.language_model import LanguageModel

UNIGRAM_TOKENS = 2**20
"""Tokens of a text whose frequencies are counted."""


@task(PERPLEXITY, settings="windows")
def perplexity(inputs: TaskInputs) -> list[Task]:
    """Return the task of the loss on the last C tokens of windows, or on all of shorter ones.

    No two windows share a scored token, since an interval over windows takes them as independent: a
    short text has fewer than the settings say. Windows of all lengths end at the same places.
    """
    split = inputs.text.split
    first_token = inputs.text.corpus.first_token
    number = min(inputs.settings, inputs.limit)
    C = inputs.training_length
    whole = held_out_windows(split, number, max(inputs.lengths), apart=C)
    if len(whole) < number:
        key = "windows" if number == inputs.settings else "limit"
        inputs.notes.append(
            f"Losses are over {counted(len(whole), 'window')}, not {number} "
            f"(evaluation.{key}): the held-out text of {len(split):,} tokens has no more whose "
            f"last {C:,} do not overlap."
        )
    tasks = []
    for length in inputs.lengths:
        windows = whole[:, -length:]
        last = min(C, length)
        of_length = Task(
            {PERPLEXITY: "Held-out perplexity"},
            length,
            fingerprint(windows, last, first_token),
            pd.DataFrame(index=range(len(windows))),
            partial(_loss_batches, windows, first_token, last),
            metric="loss",
        )
        tasks.append(of_length)
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
        means = losses.double()[:, -last:].mean(dim=1)
        finite = means.where(means.isfinite(), math.nan).tolist()
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

    Every window ``[T]`` follows ``first_token``, as in training. A forward pass reads
    ``batch_tokens`` tokens, or one sequence.

    ``reads``: largest number of tokens read to predict one, including the first token (None: all
    before it). A longer window is read in pieces of ``reads`` tokens that overlap by half and end
    with the window. Only the second half of a piece counts, and of the first piece all before.
    """
    T = windows.shape[1]
    size = min(reads or T, T)
    stride = max(1, size // 2)
    starts = [*range(T - size, 0, -stride), 0]
    cut = sliding_window_view(windows, size, axis=1)[:, starts].reshape(-1, size)
    all_tokens = torch.from_numpy(cut.astype(np.int64))

    def read(part: slice) -> Tensor:
        tokens = all_tokens[part]
        ids = tokens.roll(1, dims=1)
        ids[:, 0] = first_token
        return model.token_losses(ids.to(model.device), tokens.to(model.device)).cpu()

    read_losses = model.in_passes(read, all_tokens, batch_tokens)
    pieces = read_losses.view(len(windows), len(starts), size)
    losses = pieces.new_empty(windows.shape)
    for piece, start in reversed([*enumerate(starts)]):
        begin = size - stride if start else 0
        losses[:, start + begin : start + size] = pieces[:, piece, begin:]
    return losses


def unigram_loss(text: HeldOutText, known_text: HeldOutText, vocabulary: int) -> float:
    """Return the loss on ``text``, in nats, of a model that knows only how frequent the tokens of
    ``known_text`` are, each of the ``vocabulary`` counted once more."""

    def shares(split: HeldOutText, extra: int) -> NDArray[np.float64]:
        total = np.zeros(vocabulary)
        for weight, ids in split.parts:
            counts = np.bincount(ids[:UNIGRAM_TOKENS], minlength=vocabulary) + extra
            total += weight * counts / max(1, counts.sum())
        return total / total.sum()

    known, wanted = shares(known_text, 1), shares(text, 0)
    return float(-(wanted * np.log(known)).sum())
