"""Trials of one task, each with the largest haystack that fits a number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.evaluation.prompts import Prompt, Score, Stop
from trainer.evaluation.ruler.published import OneOrder, size, step
from trainer.evaluation.ruler.question import Kind

PROBE = 64
"""Units that are read to learn how many tokens one has."""

ENOUGH = 1 / 256
"""A haystack is large enough when this share of the length is empty, or less than one unit's
tokens: texts are not read once more for the rest."""

TOKENS_AT_ONCE = 2**20


@dataclass
class _Trial:
    """A trial whose prompt fits with ``low`` units and is too long with ``high``."""

    number: int
    units: int
    low: int
    high: float = math.inf
    prompt: Prompt | None = None
    empty: int = 0
    done: bool = False

    def learn(self, prompt: Prompt, empty: int, per_unit: float, enough: float) -> None:
        """Update the bounds; ``empty``: unused tokens, negative if the prompt is too long."""
        if empty >= 0:
            self.low, self.empty, self.prompt = self.units, empty, prompt
        else:
            self.high = self.units
        self.done = self.high - self.low == 1 or 0 <= empty <= enough
        step = self.units + math.floor(empty / per_unit)
        self.units = int(max(self.low + 1, min(step, self.high - 1)))


class RulerTask:
    """One of the thirteen tasks, as a :class:`~trainer.evaluation.prompts.Task`.

    ``bos`` begins every prompt unless it is None. A trial depends on ``seed``, the task, the length
    and its own number. ``published``: use the benchmark's sizes and orders, see
    :mod:`trainer.evaluation.ruler.published`.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        score: Score,
        stop: Stop,
        tokenizer: Tokenizer,
        bos: int | None,
        trials: int,
        seed: int,
        published: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.score: Score = score
        self.stop: Stop = stop
        self.tokenizer = tokenizer
        self.before = () if bos is None else (bos,)
        self.trials = trials
        self.seed = seed
        self.published = published

    def prompts(self, length: int) -> list[Prompt]:
        """Return trials whose prompt and answer have ``length`` tokens or slightly fewer.

        The first trial determines the number of units. The others start with it and are adjusted if
        they are too long or leave much room; with ``published`` only if they are too long, by the
        benchmark's steps.

        Raises:
            UserError: the length is too short for the task.
        """
        least = self.kind.least
        small, larger = self._read(length, [(0, least), (0, least + PROBE)])
        per_unit = (len(larger.tokens) - len(small.tokens)) / PROBE
        units = least + math.floor(self._empty(length, small) / per_unit)
        if self.published:
            (first,) = self._fitted(length, [0], units, per_unit, 0)
            return self._shrunk(length, size(self.kind, first.low, length))
        enough = max(per_unit, ENOUGH * length)
        (first,) = self._fitted(length, [0], units, per_unit, enough)
        # Half of the allowed gap is the middle of the acceptable range.
        units = first.low + round((first.empty - ENOUGH * length / 2) / per_unit)
        others = self._fitted(length, range(1, self.trials), units, per_unit, enough)
        return [trial.prompt for trial in (first, *others) if trial.prompt]

    def _shrunk(self, length: int, units: int) -> list[Prompt]:
        """Return all trials with this many units, reduced stepwise if they are too long."""
        sizes = dict.fromkeys(range(self.trials), units)
        found: dict[int, Prompt] = {}
        while missing := [number for number in sizes if number not in found]:
            prompts = self._read(length, [(number, sizes[number]) for number in missing])
            for number, prompt in zip(missing, prompts, strict=True):
                if self._empty(length, prompt) >= 0:
                    found[number] = prompt
                    continue
                sizes[number] -= step(self.kind, length)
                if sizes[number] < self.kind.least:
                    raise self._too_short(length)
        return [found[number] for number in sizes]

    def _fitted(
        self, length: int, numbers: Sequence[int], units: int, per_unit: float, enough: float
    ) -> list[_Trial]:
        least = self.kind.least
        trials = [_Trial(number, max(least, units), least - 1) for number in numbers]
        while unfinished := [trial for trial in trials if not trial.done]:
            prompts = self._read(length, [(trial.number, trial.units) for trial in unfinished])
            for trial, prompt in zip(unfinished, prompts, strict=True):
                trial.learn(prompt, self._empty(length, prompt), per_unit, enough)
        if any(trial.prompt is None for trial in trials):
            raise self._too_short(length)
        return trials

    def _too_short(self, length: int) -> UserError:
        return UserError.at(
            "evaluation.lengths",
            f"expected at least {self._least_length(length)} tokens for RULER's {self.name} with "
            f"this tokenizer, got {length}.",
        )

    def _draws(self, length: int, trial: int) -> Random:
        rng = (OneOrder if self.published else Random)(f"{self.seed} {self.name} {length} {trial}")
        if isinstance(rng, OneOrder):
            rng.order = self.seed
        return rng

    def _empty(self, length: int, prompt: Prompt) -> int:
        return length - prompt.new_tokens - len(prompt.tokens)

    def _least_length(self, length: int) -> int:
        """Return the smallest sufficient length; texts depend on the length, so it is checked
        again."""
        every = [(trial, self.kind.least) for trial in range(self.trials)]
        while (lack := min(self._empty(length, p) for p in self._read(length, every))) < 0:
            length -= lack
        return length

    def _read(self, length: int, wanted: Sequence[tuple[int, int]]) -> Iterator[Prompt]:
        """Yield trials by number and units, in batches that keep memory small."""
        size = max(1, TOKENS_AT_ONCE // length)
        for start in range(0, len(wanted), size):
            questions = [
                self.kind.question(self._draws(length, trial), trial, units, length)
                for trial, units in wanted[start : start + size]
            ]
            encoded = self.tokenizer.encode_batch_fast(
                [question.text for question in questions], add_special_tokens=False
            )
            for question, encoding in zip(questions, encoded, strict=True):
                tokens = (*self.before, *encoding.ids)
                yield Prompt(tokens, question.answers, self.kind.new_tokens, question.depth)
