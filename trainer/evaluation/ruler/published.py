"""Sizes of haystacks and orders of their parts as in the benchmark's own programs."""

from __future__ import annotations

from collections.abc import MutableSequence
from random import Random
from typing import Any

from trainer.evaluation.ruler.niah import Needles
from trainer.evaluation.ruler.question import Kind
from trainer.evaluation.ruler.variable_tracking import VariableTracking
from trainer.evaluation.ruler.word_extraction import LONG, FrequentWords


class OneOrder(Random):
    """Random draws of a trial's own, but shuffles that depend on ``order`` alone.

    Needles, words and documents are thus at the same places in all trials with equally many of
    them.
    """

    order: object = 0

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Shuffle as ``random.Random(seed).shuffle`` does in the programs, which reseed for each
        trial."""
        Random(str(self.order)).shuffle(x)


def step(kind: Kind, length: int) -> int:
    """Return the units by which a haystack shrinks if its prompt is longer than ``length``."""
    if isinstance(kind, Needles) and kind.essay:
        return 500
    if isinstance(kind, Needles):
        return 25 if length >= LONG else 5
    if isinstance(kind, VariableTracking):
        return 10 if length >= LONG else 5
    if isinstance(kind, FrequentWords):
        return max(1, (length - kind.new_tokens) // 32)
    return 10


def size(kind: Kind, most: int, length: int) -> int:
    """Return the initial number of units of all trials, if ``most`` fit the first one.

    It is ``most``, except for frequent words, which grow by :func:`step` from a sixth of the
    length.
    """
    if not isinstance(kind, FrequentWords):
        return most
    start = (length - kind.new_tokens) // 6
    return most - (most - start) % step(kind, length)
