"""Held-out loss by position and on the last tokens, at any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from trainer.common.errors import UserError
from trainer.data.order import Integers
from trainer.data.shards import TokenStream
from trainer.evaluation.passes import sequences_at_once
from trainer.model.language_model import LanguageModel

Done = Callable[[int], None]


def windows_with_common_ends(
    stream: TokenStream,
    count: int,
    lengths: list[int],
    *,
    key: str = "evaluation.lengths",
    what: str = "held-out",
) -> dict[int, Integers]:
    """``[count, length]`` held-out tokens for every length, ending at the same places.

    The last tokens of the windows are then the same tokens at every length, read with more or less
    of what comes before them: losses on them are paired. ``key``: which asks for the longest;
    ``what``: the text is called.

    Raises:
        UserError: the held-out text is shorter than the longest window.
    """
    longest = max(lengths, default=0)
    if len(stream) < longest:
        raise UserError.at(
            key,
            f"the {what} text has {len(stream)} tokens, fewer than the longest window of "
            f"{longest}; give more text, larger data.validation and data.test, or shorter lengths.",
        )
    ends = np.linspace(longest, len(stream), count).astype(np.int64)
    return {length: stream.windows(ends - length, length) for length in lengths}


def losses_by_position(
    model: LanguageModel,
    windows: Integers,
    end_of_text: int,
    batch_tokens: int,
    *,
    reads: int | None = None,
    done: Done = lambda windows: None,
) -> Tensor:
    """Mean loss at every position, ``[T]`` float64 nats, over windows ``[N, T]``: the first of
    :func:`measured_losses`."""
    return measured_losses(model, windows, end_of_text, batch_tokens, 1, reads=reads, done=done)[0]


def measured_losses(
    model: LanguageModel,
    windows: Integers,
    end_of_text: int,
    batch_tokens: int,
    last: int,
    *,
    reads: int | None = None,
    done: Done = lambda windows: None,
) -> tuple[Tensor, Tensor]:
    """Mean loss at every position, ``[T]`` float64 nats, over windows ``[N, T]``; and of every
    window on its ``last`` tokens, ``[N]``.

    Every window is read behind one end-of-text token, as in training. Memory is linear in the
    length.

    Args:
        model: a decoder.
        windows: tokens, all of which are predicted.
        end_of_text: what stands before each.
        batch_tokens: tokens in one forward pass (at least one sequence).
        last: tokens at the end of a window.
        reads: the most tokens that are read to predict one, the end-of-text token included (None:
            all before it). The window is then read in pieces of ``reads`` tokens, each from half a
            piece after the one before. Of a piece the second half counts, which has at least
            half of ``reads`` tokens before it; of the first one both halves. The pieces end where
            the window ends, so that its last tokens are read alike at every length.
        done: told the number of windows after each batch.
    """
    total = torch.zeros(windows.shape[1], dtype=torch.float64)
    by_window = []
    for losses in _losses(model, windows, end_of_text, batch_tokens, reads):
        total += losses.double().sum(dim=0)
        by_window.append(losses[:, -last:].double().mean(dim=1))
        done(len(losses))
    return total / len(windows), torch.cat(by_window)


@torch.no_grad()
def _losses(
    model: LanguageModel,
    windows: Integers,
    end_of_text: int,
    batch_tokens: int,
    reads: int | None,
) -> Iterator[Tensor]:
    """Losses ``[B, T]`` on the CPU of some windows after the other."""
    T = windows.shape[1]
    size = min(reads or T, T)
    stride = max(1, size // 2)
    pieces = 1 + -((size - T) // stride)
    positions = np.arange(T)
    # The pieces are counted from the end; the first one holds all that is left.
    piece = np.minimum((T - 1 - positions) // stride, pieces - 1)
    starts = np.maximum(T - size - stride * np.arange(piece.max() + 1), 0)
    place = positions - starts[piece]
    device = model.device
    rows, together = max(1, batch_tokens // T), sequences_at_once(model, size, batch_tokens)
    for first in range(0, len(windows), rows):
        part = windows[first : first + rows]
        cut = sliding_window_view(part, size, axis=1)[:, starts].reshape(-1, size)
        found = []
        for tokens in torch.from_numpy(cut.astype(np.int64)).split(together):
            ids = tokens.roll(1, dims=1)
            ids[:, 0] = end_of_text
            found.append(model.token_losses(ids.to(device), tokens.to(device)).cpu())
        yield torch.cat(found).view(len(part), len(starts), size)[:, piece, place]


def by_bucket(losses: Tensor, bucket: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Mean losses of consecutive buckets of positions, and the buckets' edges."""
    edges = (*range(0, len(losses), bucket), len(losses))
    means = tuple(losses[a:b].mean().item() for a, b in pairwise(edges))
    return edges, means
