"""How a cell's sequences are divided: into batches of a forward pass, and batches into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from trainer.model.language_model import LanguageModel

T = TypeVar("T")
IN_CACHE = 2**19
"""Numbers of a layer's input that stay in a processor's cache until the layer has used them."""


@dataclass(frozen=True)
class Piece:
    """Part ``index`` of ``count`` parts of a cell."""

    index: int = 0
    count: int = 1

    def among(self, batches: Sequence[T]) -> Sequence[T]:
        """Return this part of the batches. Batches stay whole, so that a cell measured in parts has
        the same numbers, digit for digit, as one measured at once."""
        first, end = (len(batches) * i // self.count for i in (self.index, self.index + 1))
        return batches[first:end]


WHOLE = Piece()


PREFILL = 32768
"""Tokens of a long sequence that a GPU reads at once, unless the configuration says otherwise."""


def prefill_chunk(asked: int | None, device: str) -> int | None:
    """Return how many tokens of a sequence are read at once (None: all of them)."""
    return PREFILL if asked is None and device == "cuda" else asked


Dtype = Literal["fp32", "bf16"]


def precision_of(dtype: Dtype | None, device: str) -> Dtype:
    """Return the type of weights that an evaluation computes with; ``dtype``: as configured."""
    if dtype is not None:
        return dtype
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


def sequences_at_once(model: LanguageModel, length: int, batch_tokens: int) -> int:
    """Return how many sequences of ``length`` tokens a forward pass reads: at least one, and at
    most ``batch_tokens`` tokens together.

    On a CPU there are no more than its caches hold: with more, every layer waits for memory.
    """
    if model.computes_on == "cpu":
        batch_tokens = min(batch_tokens, IN_CACHE // model.config.hidden_size)
    return max(1, batch_tokens // length)
