"""Held-out loss by position, at any length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trainer.data.corpus import TokenStream
from trainer.data.dataset import as_batch
from trainer.data.order import Integers
from trainer.errors import UserError
from trainer.model.decoder import Decoder


def windows_with_common_ends(
    stream: TokenStream, count: int, lengths: list[int]
) -> dict[int, Integers]:
    """``[count, length]`` held-out tokens for every length, ending at the same places.

    The last tokens of the windows are then the same tokens at every length, read with more or less
    of what comes before them: losses on them are paired.

    Raises:
        UserError: the held-out text is shorter than the longest window.
    """
    longest = max(lengths)
    if len(stream) < longest:
        raise UserError(
            f"evaluation.lengths: the held-out text has {len(stream)} tokens, fewer than the "
            f"longest window of {longest}; give more text, larger data.test, or shorter lengths."
        )
    ends = np.linspace(longest, len(stream), count).astype(np.int64)
    return {length: stream.windows(ends - length, length) for length in lengths}


@torch.no_grad()
def losses_by_position(
    model: Decoder, windows: Integers, end_of_text: int, batch_tokens: int
) -> Tensor:
    """Mean loss at every position, ``[T]`` float64 nats, over windows ``[N, T]``.

    Every window is read behind one end-of-text token, as in training.
    """
    batch = as_batch(windows, end_of_text, np.ones(windows.shape, dtype=np.float32))
    size = max(1, batch_tokens // windows.shape[1])
    device = model.norm.weight.device
    total = torch.zeros(windows.shape[1], dtype=torch.float64)
    for ids, labels in zip(
        batch["input_ids"].split(size), batch["labels"].split(size), strict=True
    ):
        losses = model.token_losses(ids.to(device), labels.to(device))
        total += losses.double().sum(dim=0).cpu()
    return total / len(windows)


def by_bucket(losses: Tensor, bucket: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Mean losses of consecutive buckets of positions, and the buckets' edges."""
    edges = (*range(0, len(losses), bucket), len(losses))
    means = tuple(losses[a:b].mean().item() for a, b in pairwise(edges))
    return edges, means
