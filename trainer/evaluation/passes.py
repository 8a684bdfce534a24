"""Division of a cell's sequences into batches, and of batches into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from trainer.model.language_model import LanguageModel

T = TypeVar("T")
Done = Callable[[int], None]
"""Callback that receives the number of sequences read."""
IN_CACHE = 2**18
"""Elements of a layer's input that fit in a processor's cache while the layer uses them."""


@dataclass(frozen=True)
class Piece:
    """Part ``index`` of ``count`` parts of a cell."""

    index: int = 0
    count: int = 1

    def among(self, batches: Sequence[T]) -> Sequence[T]:
        """Return this part of the batches.

        Batches stay whole, so that a cell measured in parts has the same numbers, digit for digit,
        as one measured at once.
        """
        first, end = (len(batches) * i // self.count for i in (self.index, self.index + 1))
        return batches[first:end]


WHOLE = Piece()


def longest_first(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of sequences to read together: at most ``batch_tokens`` tokens, as if all were
    as long as the longest, or one sequence."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def no_progress(sequences: int) -> None:
    """Ignore the number of sequences read."""


PREFILL = 32768
"""Tokens of a long sequence that are read at once."""

Dtype = Literal["fp32", "bf16"]


def precision_of(dtype: Dtype | None, device: str) -> Dtype:
    """Return the dtype of an evaluation's weights; ``dtype``: as configured."""
    if dtype is not None:
        return dtype
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


def sequences_at_once(model: LanguageModel, length: int, batch_tokens: int) -> int:
    """Return the number of sequences of ``length`` tokens in a forward pass.

    It is at least one, and otherwise at most ``batch_tokens`` tokens in all. On a CPU, the batch
    must also fit in the caches: a larger one is bound by memory bandwidth.
    """
    if model.device.type == "cpu":
        batch_tokens = min(batch_tokens, IN_CACHE // model.config.hidden_size)
    return max(1, batch_tokens // length)
