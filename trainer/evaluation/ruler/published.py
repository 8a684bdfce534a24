"""Sizes of haystacks and orders of their parts as the benchmark's own programs have them."""

from __future__ import annotations

from collections.abc import MutableSequence
from random import Random
from typing import Any

from trainer.evaluation.ruler.niah import Needles
from trainer.evaluation.ruler.question import Kind
from trainer.evaluation.ruler.variable_tracking import VariableTracking
from trainer.evaluation.ruler.word_extraction import LONG, FrequentWords


class OneOrder(Random):
    """Draws of a trial's own, and one order for all trials: what is shuffled, needles, words and
    documents, comes out by ``order`` alone, so that it lies at the same places wherever as much is
    shuffled."""

    order: object = 0

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """As ``random.Random(seed).shuffle`` of the programs does, in each trial anew."""
        Random(str(self.order)).shuffle(x)


def step(kind: Kind, length: int) -> int:
    """By how many units a haystack becomes smaller where its prompt is longer than ``length``."""
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
    """The units that all trials begin with, where ``most`` fit the first one: as many, but for
    frequent words, which grow by :func:`step` from a sixth of the length on."""
    if not isinstance(kind, FrequentWords):
        return most
    start = (length - kind.new_tokens) // 6
    return most - (most - start) % step(kind, length)
