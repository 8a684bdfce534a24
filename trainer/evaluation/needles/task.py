"""Needle tasks: trials of an exact length in tokens, the same for every model and method.

A trial depends only on the seed, its number and the length; its quiz not even on the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import Field

from trainer.common.errors import Problem, UserError
from trainer.common.fields import Count, Natural, Share, configuration
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.needles.quiz import TOKENS_PER_VALUE, DrawQuiz, Quiz
from trainer.evaluation.prompts import Prompt, Score, Stop


@configuration
class NeedleTaskSettings:
    """Settings of statements and of all tasks with needles."""

    trials: Annotated[Count, Field(le=1_000_000)] = 256
    """Trials of a cell: at each depth in tasks with one needle, at each length in the others."""
    depths: tuple[Share, ...] = tuple(step / 10 for step in range(11))
    """Places of the needle: 0 the beginning of the text, 1 its end."""
    needles: Count = 4
    """Needles in tasks that state several."""
    sinks: Count = 8
    """Tokens behind the needle in the task noisy."""
    seed: Natural = 1
    """Seed of the trials."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        if self.depths:
            return []
        return [Problem("evaluation.needles.depths", "expected one or more, got none.")]


@dataclass(frozen=True)
class _Trial:
    """Tokens of a quiz's needles and question."""

    quiz: Quiz
    needles: list[list[int]]
    question: list[int]

    @property
    def tokens(self) -> int:
        return len(self.question) + sum(map(len, self.needles))


@dataclass(frozen=True)
class NeedleTask:
    """A needle task, a :class:`~trainer.evaluation.prompts.Task`.

    ``draw``: makes quizzes of ``needles`` needles. ``depths``: depths of the needle, one prompt
    each; None: all needles at random places. ``behind``: tokens directly after every needle.
    ``opening``: text before the haystack; ``closing``: text before every question.
    """

    name: str
    score: Score
    stop: Stop
    settings: NeedleTaskSettings
    haystack: Haystack
    draw: DrawQuiz
    needles: int = 1
    new_tokens: int = TOKENS_PER_VALUE
    depths: tuple[float, ...] | None = None
    behind: tuple[int, ...] = ()
    opening: str = ""
    closing: str = "\n\n"

    def prompts(self, length: int) -> list[Prompt]:
        """Return the trials; with ``depths``, those of one text follow each other and form a group.

        Raises:
            UserError: ``length`` is too short for the needles and the question, or the text for
                ``length``.
        """
        trials = [self._trial(number) for number in range(self.settings.trials)]
        around = len(self._before) + self.new_tokens
        least = max(trial.tokens for trial in trials) + around + 1
        if length < least:
            raise UserError.at(
                "evaluation.lengths",
                f"expected at least {least} tokens for {self.name}, which its needles, question "
                f"and answer need, got {length}.",
            )
        return [
            prompt
            for number, trial in enumerate(trials)
            for prompt in self._prompts(trial, number, length - around - trial.tokens)
        ]

    def _trial(self, number: int) -> _Trial:
        haystack = self.haystack
        random = np.random.default_rng((self.settings.seed, number, 0))
        quiz = self.draw(self.needles, haystack.numbers, random)
        needles = [[*haystack.encode(f" {text}"), *self.behind] for text in quiz.needles]
        return _Trial(quiz, needles, haystack.encode(f"{self.closing}{quiz.question}"))

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """Tokens before the haystack."""
        if not self.opening:
            return self.haystack.bos
        encoding = self.haystack.tokenizer.encode(self.opening, add_special_tokens=False)
        return (*self.haystack.bos, *encoding.ids)

    def _prompts(self, trial: _Trial, number: int, room: int) -> list[Prompt]:
        """Return the prompts of a trial with ``room`` tokens of haystack each."""
        random = np.random.default_rng((self.settings.seed, number, 1))
        excerpt = self.haystack.excerpt(room, random)
        found = []
        for wanted in self.depths or (None,):
            depths = random.random(self.needles) if wanted is None else [wanted]
            places = [excerpt.place(depth) for depth in depths]
            text = excerpt.with_insertions(list(zip(places, trial.needles, strict=True)))
            first = min(places[asked] for asked in trial.quiz.asked)
            found.append(
                Prompt(
                    (*self._before, *text, *trial.question),
                    trial.quiz.answers,
                    self.new_tokens,
                    round(first / room, 4) if wanted is None else wanted,
                    None if wanted is None else number,
                )
            )
        return found
