"""Division of a cell's sequences into batches, and of batches into parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from trainer.model.language_model import LanguageModel

T = TypeVar("T")
Piece = tuple[int, int]
"""Index of a part of a cell, and the number of its parts."""
WHOLE: Piece = (0, 1)
IN_CACHE = 2**18
"""Elements of a layer's input that fit in a processor's cache while the layer uses them."""


def part_of(batches: Sequence[T], part: Piece) -> Sequence[T]:
    """Return every n-th of the batches.

    Batches stay whole, so that a cell measured in parts has the same numbers, digit for digit, as
    one measured at once.
    """
    index, count = part
    return batches[index::count]


def longest_first(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of sequences to read together: at most ``batch_tokens`` tokens, as if all were
    as long as the longest, or one sequence."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def sequences_at_once(model: LanguageModel, length: int, batch_tokens: int) -> int:
    """Return the number of sequences of ``length`` tokens in a forward pass.

    It is at least one, and otherwise at most ``batch_tokens`` tokens in all. On a CPU, the batch
    must also fit in the caches: a larger one is bound by memory bandwidth.
    """
    if model.device.type == "cpu":
        batch_tokens = min(batch_tokens, IN_CACHE // model.config.hidden_size)
    return max(1, batch_tokens // length)
