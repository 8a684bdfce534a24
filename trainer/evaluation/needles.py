"""Needle tasks by name: trials of an exact length in tokens, equal for every model and method.

A trial depends only on the seed, its number and the length; its quiz only on the first two. The
sentences are those of DroPE, App. C.2, which are RULER's without introduction and chat template. A
question ends so that the answer continues the text, which suits models that were never taught to
answer. As in RULER (Hsieh et al. 2024), keys are ``adjective-noun`` of wonderwords' lists and
values numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import TypeVar

import numpy as np
import wonderwords

from trainer.common.errors import UserError
from trainer.config import NeedleTaskSettings
from trainer.data.tokenizer import end_of_text
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.scoring import (
    Prompt,
    Score,
    Stop,
    after_all,
    after_number,
    after_sentence,
    exact_number,
    rouge_1_recall,
    string_match_all,
)


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Return a list of wonderwords: ``adjective``, ``noun``, ``verb``, ``profanity``."""
    file = resources.files(wonderwords) / "assets" / f"{name}list.txt"
    return tuple(map(str.strip, file.read_text("utf-8").splitlines()))


@cache
def words(kind: str) -> tuple[str, ...]:
    """Return a list's plain lower-case words, sorted, without profanity."""
    plain = {word for word in word_list(kind) if re.fullmatch(r"[a-z]+", word)}
    return tuple(sorted(plain.difference(word_list("profanity"))))


def draw_keys(count: int, random: np.random.Generator) -> list[str]:
    """Draw distinct keys ``adjective-noun``."""
    adjectives, nouns = words("adjective"), words("noun")
    chosen = random.choice(len(adjectives) * len(nouns), size=count, replace=False, shuffle=True)
    pairs = (divmod(int(number), len(nouns)) for number in chosen)
    return [f"{adjectives[a]}-{nouns[n]}" for a, n in pairs]


def draw_values(count: int, digits: int, taken: str, random: np.random.Generator) -> list[str]:
    """Draw distinct numbers of ``digits`` digits that do not occur in the text ``taken``."""
    values: list[str] = []
    while len(values) < count:
        value = str(random.integers(10 ** (digits - 1), 10**digits))
        if value not in taken and value not in values:
            values.append(value)
    return values


DIGITS = 7
TOKENS_PER_VALUE = 16
"""Room in an answer. Seven digits and a space are at most 8 tokens, a byte each; the others are for
words between them."""


@dataclass(frozen=True)
class Quiz:
    """``needles``: sentences to hide. ``question``: end of the prompt. ``answers``: right answers.
    ``asked``: indices of the needles that contain them."""

    needles: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    asked: tuple[int, ...]


DrawQuiz = Callable[[int, str, np.random.Generator], Quiz]
"""Draws a quiz with a number of needles, whose values are not in a text."""


def needle(key: str, value: str) -> str:
    """Return the sentence that states a value."""
    return f"One of the special magic numbers for {key} is: {value}."


def one_of_many(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several keys, one of them queried; with one needle, the standard quiz."""
    keys, values = draw_keys(count, random), draw_values(count, DIGITS, taken, random)
    asked = int(random.integers(count))
    question = f"The special magic number for {keys[asked]} mentioned in the provided text is:"
    needles = tuple(map(needle, keys, values))
    return Quiz(needles, question, (values[asked],), (asked,))


def all_keys(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several keys, all of them queried."""
    keys, values = draw_keys(count, random), draw_values(count, DIGITS, taken, random)
    question = f"The special magic numbers for {listed(keys)} mentioned in the provided text are:"
    return Quiz(tuple(map(needle, keys, values)), question, tuple(values), tuple(range(count)))


def all_values(count: int, taken: str, random: np.random.Generator) -> Quiz:
    """Make a quiz with several values of one key, all of them queried."""
    (key,), values = draw_keys(1, random), draw_values(count, DIGITS, taken, random)
    question = (
        f"What are all the special magic numbers for {key} mentioned in the provided text? "
        f"The special magic numbers for {key} mentioned in the provided text are:"
    )
    needles = tuple(needle(key, value) for value in values)
    return Quiz(needles, question, tuple(values), tuple(range(count)))


def listed(items: list[str]) -> str:
    """Format ``a``, ``a and b``, ``a, b, and c``."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + f", and {items[-1]}"


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
    """A needle task, a :class:`~trainer.evaluation.scoring.Task`.

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
        fixed = len(self._before) + self.new_tokens
        least = max(trial.tokens for trial in trials) + fixed + 1
        if length < least:
            raise UserError(
                f"evaluation.lengths: expected {least} tokens or more for {self.name}, got {length}"
            )
        return [
            prompt
            for number, trial in enumerate(trials)
            for prompt in self._prompts(trial, number, length - fixed - trial.tokens)
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
        prompts = []
        for wanted in self.depths or (None,):
            depths = random.random(self.needles) if wanted is None else [wanted]
            places = [excerpt.place(depth) for depth in depths]
            text = excerpt.with_insertions(list(zip(places, trial.needles, strict=True)))
            first = min(places[asked] for asked in trial.quiz.asked)
            prompts.append(
                Prompt(
                    (*self._before, *text, *trial.question),
                    trial.quiz.answers,
                    self.new_tokens,
                    round(first / room, 4) if wanted is None else wanted,
                    None if wanted is None else number,
                )
            )
        return prompts


MakeTask = Callable[[Haystack, NeedleTaskSettings], NeedleTask]
M = TypeVar("M", bound=MakeTask)
NEEDLE_TASKS: dict[str, MakeTask] = {}
"""Makers of tasks by their names in ``evaluation.tasks``."""


def needle_task(make: M) -> M:
    """Register ``make`` under its own name; use it in a file that ``plugins`` names."""
    NEEDLE_TASKS[make.__name__] = make
    return make


ONE_NUMBER = exact_number, after_number
ALL_NUMBERS = string_match_all, after_all


@needle_task
def standard(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Make the task with one needle at every depth (Kamradt 2023; DroPE, App. C.2)."""
    return NeedleTask(
        "standard", *ONE_NUMBER, settings, haystack, one_of_many, depths=settings.depths
    )


SINKS = 8
"""Tokens behind the needle; the paper gives no number."""


@needle_task
def noisy(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Make :func:`standard` with eight attention sinks after the needle, in the same trials.

    They repeat a start-of-sequence symbol, which draws attention, directly after the needle (DoPE,
    noisy setups). The symbol is the last of ``haystack.bos``, else end-of-text.
    """
    sink = haystack.bos[-1] if haystack.bos else end_of_text(haystack.tokenizer, haystack.eos)
    return replace(standard(haystack, settings), name="noisy", behind=(sink,) * SINKS)


@needle_task
def multi_key(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Make the task with several keys, one of them queried."""
    needles = settings.needles
    return NeedleTask("multi_key", *ONE_NUMBER, settings, haystack, one_of_many, needles)


@needle_task
def multi_query(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Make the task with several keys, all queried; the score is the share found."""
    needles = settings.needles, TOKENS_PER_VALUE * settings.needles
    return NeedleTask("multi_query", *ALL_NUMBERS, settings, haystack, all_keys, *needles)


@needle_task
def multi_value(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Make the task with several values of one key, all queried; the score is the share found."""
    task = multi_query(haystack, settings)
    return replace(task, name="multi_value", draw=all_values)


PLACE = "The best thing to do in San Francisco is"
THING = "eat a sandwich and sit in Dolores Park on a sunny day."


def _best_thing(count: int, taken: str, random: np.random.Generator) -> Quiz:
    question = "What is the best thing to do in San Francisco?\nAnswer:"
    return Quiz((f"{PLACE} {THING}\n",), question, (THING,), (0,))


@needle_task
def sentence(haystack: Haystack, settings: NeedleTaskSettings) -> NeedleTask:
    """Hide one sentence at every depth of a book, and ask for it (Kamradt 2023).

    Fu et al. 2024 use this prompt for base models, as does Frequency Entropy, App. E. The score is
    the share of the answer's words in 50 tokens (more if a tokenizer needs more), as in Fu et al.'s
    heat maps. They count distinct words between white space, so that a complete answer, which says
    "a" twice, scores 11 of 12; ROUGE-1 recall gives it 1. Their prompt begins with
    ``<|im_start|>``, which base models lack and which is omitted.
    """
    return NeedleTask(
        "sentence",
        rouge_1_recall,
        after_sentence,
        settings,
        haystack,
        _best_thing,
        new_tokens=max(50, len(haystack.encode(f" {THING}"))),
        depths=settings.depths,
        opening="This is a very long story book: <book>",
        closing=" </book>.\nBased on the content of the book, Question: ",
    )
