"""Needle tasks by name: trials of an exact length in tokens, equal for every model and method.

A trial depends only on the seed, its number and the length; its quiz only on the first two. The
sentences are those of DroPE, App. C.2, which are RULER's without introduction and chat template. A
question ends so that the answer continues the text, which suits models that were never taught to
answer. As in RULER (Hsieh et al. 2024), keys are ``adjective-noun`` of wonderwords' lists and
values numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

import numpy as np
import wonderwords

from trainer.common.errors import UserError
from trainer.common.words import counted
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


def hidden(
    haystack: Haystack,
    settings: NeedleTaskSettings,
    length: int,
    draw: DrawQuiz,
    *,
    needles: int = 1,
    new_tokens: int = TOKENS_PER_VALUE,
    depths: Sequence[float] = (),
    behind: tuple[int, ...] = (),
    opening: str = "",
    closing: str = "\n\n",
) -> list[Prompt]:
    """Return prompts with needles in excerpts of a haystack, and their question at the end.

    Prompt and answer, of at most ``new_tokens``, have ``length`` tokens. Prompts of one excerpt
    follow each other and form a group. ``draw``: makes quizzes of ``needles`` needles. ``depths``:
    depths of the needle, one prompt each; empty: all needles at random places. ``behind``: tokens
    directly after every needle. ``opening``: text before the haystack; ``closing``: text before
    every question.

    Raises:
        UserError: ``length`` is too short for the needles and the question, or the text for
            ``length``.
    """
    tokenizer = haystack.tokenizer
    before = (*haystack.bos, *tokenizer.encode(opening, add_special_tokens=False).ids)
    prompts = []
    for trial in range(settings.trials):
        random = np.random.default_rng((settings.seed, trial, 0))
        quiz = draw(needles, haystack.numbers, random)
        sentences = [[*haystack.encode(f" {text}"), *behind] for text in quiz.needles]
        question = haystack.encode(f"{closing}{quiz.question}")
        fixed = len(before) + sum(map(len, sentences)) + len(question) + new_tokens
        if length <= fixed:
            raise UserError(
                f"evaluation.lengths: {length} tokens are too few for "
                f"{counted(needles, 'needle')} and a question"
            )
        random = np.random.default_rng((settings.seed, trial, 1))
        excerpt = haystack.excerpt(length - fixed, random)
        for depth in depths or (None,):
            wanted = random.random(needles) if depth is None else [depth]
            places = [excerpt.place(share) for share in wanted]
            text = excerpt.with_insertions(list(zip(places, sentences, strict=True)))
            first = min(places[asked] for asked in quiz.asked) / (length - fixed)
            prompts.append(
                Prompt(
                    (*before, *text, *question),
                    quiz.answers,
                    new_tokens,
                    round(first, 4) if depth is None else depth,
                    None if depth is None else trial,
                )
            )
    return prompts


MakePrompts = Callable[[Haystack, NeedleTaskSettings, int], list[Prompt]]
"""Returns the prompts for a haystack, settings and a length in tokens, prompt and answer together.
"""


@dataclass(frozen=True)
class NeedleTask:
    """A registered function as a :class:`~trainer.evaluation.scoring.Task`."""

    make: MakePrompts
    score: Score
    stop: Stop | None
    haystack: Haystack
    settings: NeedleTaskSettings

    @property
    def name(self) -> str:
        """Name in ``evaluation.tasks``."""
        return self.make.__name__

    def prompts(self, length: int) -> list[Prompt]:
        """Return the trials at ``length`` tokens; see :func:`hidden` for errors."""
        return self.make(self.haystack, self.settings, length)


NEEDLE_TASKS: dict[str, Callable[[Haystack, NeedleTaskSettings], NeedleTask]] = {}
"""Makers of tasks by their names in ``evaluation.tasks``."""


def needle_task(score: Score, stop: Stop | None = None) -> Callable[[MakePrompts], MakePrompts]:
    """Register a function that makes prompts as the task of its name.

    Use it in a file that ``plugins`` names. ``score`` compares an answer with the right ones;
    ``stop`` says whether an answer can end early (None: never).
    """

    def register(make: MakePrompts) -> MakePrompts:
        NEEDLE_TASKS[make.__name__] = partial(NeedleTask, make, score, stop)
        return make

    return register


@needle_task(exact_number, after_number)
def standard(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide one needle at every depth (Kamradt 2023; DroPE, App. C.2)."""
    return hidden(haystack, settings, length, one_of_many, depths=settings.depths)


SINKS = 8
"""Tokens behind the needle; the paper gives no number."""


@needle_task(exact_number, after_number)
def noisy(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Put attention sinks after the needle of :func:`standard`, in the same trials.

    They repeat a start-of-sequence symbol, which draws attention, directly after the needle (DoPE,
    noisy setups). The symbol is the last of ``haystack.bos``, else end-of-text.
    """
    sink = haystack.bos[-1] if haystack.bos else end_of_text(haystack.tokenizer, haystack.eos)
    behind = (sink,) * SINKS
    return hidden(haystack, settings, length, one_of_many, depths=settings.depths, behind=behind)


@needle_task(exact_number, after_number)
def multi_key(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several keys, and ask for one of them."""
    return hidden(haystack, settings, length, one_of_many, needles=settings.needles)


@needle_task(string_match_all, after_all)
def multi_query(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several keys, and ask for all of them; the score is the share found."""
    needles, new = settings.needles, TOKENS_PER_VALUE * settings.needles
    return hidden(haystack, settings, length, all_keys, needles=needles, new_tokens=new)


@needle_task(string_match_all, after_all)
def multi_value(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several values of one key, and ask for all of them; the score is the share found."""
    needles, new = settings.needles, TOKENS_PER_VALUE * settings.needles
    return hidden(haystack, settings, length, all_values, needles=needles, new_tokens=new)


PLACE = "The best thing to do in San Francisco is"
THING = "eat a sandwich and sit in Dolores Park on a sunny day."


def _best_thing(count: int, taken: str, random: np.random.Generator) -> Quiz:
    question = "What is the best thing to do in San Francisco?\nAnswer:"
    return Quiz((f"{PLACE} {THING}\n",), question, (THING,), (0,))


@needle_task(rouge_1_recall, after_sentence)
def sentence(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide one sentence at every depth of a book, and ask for it (Kamradt 2023).

    Fu et al. 2024 use this prompt for base models, as does Frequency Entropy, App. E. The score is
    the share of the answer's words in 50 tokens (more if a tokenizer needs more), as in Fu et al.'s
    heat maps. They count distinct words between white space, so that a complete answer, which says
    "a" twice, scores 11 of 12; ROUGE-1 recall gives it 1. Their prompt begins with
    ``<|im_start|>``, which base models lack and which is omitted.
    """
    return hidden(
        haystack,
        settings,
        length,
        _best_thing,
        new_tokens=max(50, len(haystack.encode(f" {THING}"))),
        depths=settings.depths,
        opening="This is a very long story book: <book>",
        closing=" </book>.\nBased on the content of the book, Question: ",
    )
