"""Needle tasks by name: statements hidden in text, and a question at its end.

Prompts are assembled from tokens, so that prompt and answer have exactly the length asked for. A
trial depends only on the seed, its number and the length, and its quiz only on the first two. The
sentences are those of DroPE, App. C.2, which are RULER's without introduction and chat template. As
in RULER (Hsieh et al. 2024), keys are ``adjective-noun`` of wonderwords' lists and values numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib import resources
from itertools import chain, compress

import numpy as np
import wonderwords

from trainer.config import NeedleTaskSettings
from trainer.evaluation.held_out import Haystack
from trainer.evaluation.scoring import (
    Prompt,
    Score,
    Stop,
    after_number,
    check_room,
    exact_number,
    once_right,
    rouge_1_recall,
    string_match_all,
)
from trainer.evaluation.task import PromptTask, TaskInputs, task


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Return a list of wonderwords: ``adjective``, ``noun``, ``verb``, ``profanity``."""
    file = resources.files(wonderwords) / "assets" / f"{name}list.txt"
    return tuple(map(str.strip, file.read_text("utf-8").splitlines()))


@cache
def plain_words(name: str) -> list[str]:
    """Return a list's plain lower-case words, sorted, without profanity."""
    plain = {word for word in word_list(name) if re.fullmatch(r"[a-z]+", word)}
    return sorted(plain.difference(word_list("profanity")))


def draw_keys(count: int, random: np.random.Generator) -> list[str]:
    """Draw distinct keys ``adjective-noun``."""
    adjectives, nouns = plain_words("adjective"), plain_words("noun")
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
"""Room in an answer: seven digits and a space are at most 8 tokens, a byte each."""


@dataclass(frozen=True)
class Quiz:
    """Sentences to hide, and a question about them.

    ``question``: end of the prompt. ``answers``: right ones. ``new_tokens``: most tokens of an
    answer. ``opening``: text before the haystack.
    """

    needles: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    new_tokens: int
    opening: str = ""


def magic_numbers(
    taken: str,
    random: np.random.Generator,
    *,
    keys: int = 1,
    values: int = 1,
    asks_for_all: bool = False,
) -> Quiz:
    """Draw a quiz: ``keys`` keys with ``values`` numbers each, which the text ``taken`` lacks.

    One of the keys is asked for, or with ``asks_for_all`` all of them.
    """
    names = draw_keys(keys, random)
    numbers = draw_values(keys * values, DIGITS, taken, random)
    stated = [(names[i // values], number) for i, number in enumerate(numbers)]
    needles = [f"One of the special magic numbers for {k} is: {v}." for k, v in stated]
    chosen = names if asks_for_all or keys == 1 else [names[random.integers(keys)]]
    answers = tuple(number for name, number in stated if name in chosen)
    about = f"for {listed(chosen)} mentioned in the provided text"
    question = f"The special magic numbers {about} are:"
    if len(answers) == 1:
        question = f"The special magic number {about} is:"
    if values > 1:
        question = f"What are all the special magic numbers {about}? {question}"
    return Quiz(tuple(needles), f"\n\n{question}", answers, TOKENS_PER_VALUE * len(answers))


def listed(items: list[str]) -> str:
    """Format ``a``, ``a and b``, ``a, b, and c``."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + f", and {items[-1]}"


def prompts_with_needles(
    haystack: Haystack,
    settings: NeedleTaskSettings,
    length: int,
    draw: Callable[[str, np.random.Generator], Quiz],
    behind: tuple[int, ...] = (),
) -> list[Prompt]:
    """Return prompts with needles in excerpts of a haystack, and their question at the end.

    A single needle is at each of the depths in ``settings``, in one prompt each; several are at
    random places. Prompts of one excerpt follow each other and form a group.

    Args:
        length: tokens of a prompt and its answer together.
        draw: makes the quiz of a trial; none of its numbers may be in the text that it gets.
        behind: tokens directly after every needle.

    Raises:
        UserError: ``length`` is too short for the needles and the question, or the text for
            ``length``.
    """
    prompts = []
    for trial in range(settings.trials):
        quiz = draw(haystack.numbers, np.random.default_rng((settings.seed, trial, 0)))
        new_tokens = settings.new_tokens or quiz.new_tokens
        (before,) = haystack.encoder.tokens([quiz.opening])
        needles = [[*haystack.encode(f" {text}"), *behind] for text in quiz.needles]
        has_answer = [any(map(text.count, quiz.answers)) for text in quiz.needles]
        question = haystack.encode(quiz.question)
        room = length - len(before) - sum(map(len, needles)) - len(question) - new_tokens
        check_room(room - 1, "needles and a question", length)
        random = np.random.default_rng((settings.seed, trial, 1))
        begin = haystack.begin(room, random)
        text = haystack.tokens[begin : begin + room]
        if len(needles) == 1:
            depths_of_prompts = [[depth] for depth in settings.depths]
        else:
            depths_of_prompts = [random.random(len(needles)).tolist()]
        for depths in depths_of_prompts:
            places = [haystack.place(begin, room, depth) for depth in depths]
            at = np.repeat(places, [len(needle) for needle in needles])
            with_needles = np.insert(text, at, list(chain.from_iterable(needles))).tolist()
            depth = depths[0]
            if len(needles) > 1:
                depth = round(min(compress(places, has_answer)) / room, 4)
            tokens = (*before, *with_needles, *question)
            prompts.append(Prompt(tokens, quiz.answers, new_tokens, depth, trial))
    return prompts


MakePrompts = Callable[[Haystack, NeedleTaskSettings, int], list[Prompt]]
"""Returns prompts for a haystack, settings and a length in tokens, the answer included."""

NEEDLE_TASKS: dict[str, Callable[[Haystack, NeedleTaskSettings], PromptTask]] = {}
"""Tasks of prompts with needles, by their names in ``evaluation.tasks``."""


def needle_task(score: Score, stop: Stop | None = None) -> Callable[[MakePrompts], MakePrompts]:
    """Register a function that makes prompts as the task of its name.

    Use it in a file that ``plugins`` names; settings are those of ``evaluation.needles``.
    ``score`` compares an answer with the right ones; ``stop`` says whether an answer can end early
    (None: never).
    """

    def register(make: MakePrompts) -> MakePrompts:
        name = make.__name__

        def prompt_task(haystack: Haystack, settings: NeedleTaskSettings) -> PromptTask:
            prompts = partial(make, haystack, settings)
            return PromptTask(name, haystack.encoder.tokenizer, prompts, score, stop)

        @task(name, settings="needles")
        @wraps(make)
        def tasks(inputs: TaskInputs) -> list[PromptTask]:
            settings = replace(inputs.settings, trials=inputs.trials)
            return [NEEDLE_TASKS[name](inputs.text.haystack, settings)]

        NEEDLE_TASKS[name] = prompt_task
        return make

    return register


@needle_task(exact_number, after_number)
def standard(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide one needle at every depth (Kamradt 2023; DroPE, App. C.2)."""
    return prompts_with_needles(haystack, settings, length, magic_numbers)


SINKS = 8
"""Tokens behind the needle; the paper gives no number."""


@needle_task(exact_number, after_number)
def noisy(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Repeat a start-of-sequence symbol, which draws attention, directly after the needle of
    :func:`standard`, in the same trials (DoPE, noisy setups)."""
    behind = (haystack.encoder.first_token,) * SINKS
    return prompts_with_needles(haystack, settings, length, magic_numbers, behind)


@needle_task(exact_number, after_number)
def multi_key(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several keys, and ask for one of them."""
    draw = partial(magic_numbers, keys=settings.needles)
    return prompts_with_needles(haystack, settings, length, draw)


@needle_task(string_match_all, once_right(string_match_all))
def multi_query(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several keys, and ask for all of them; the score is the share found."""
    draw = partial(magic_numbers, keys=settings.needles, asks_for_all=True)
    return prompts_with_needles(haystack, settings, length, draw)


@needle_task(string_match_all, once_right(string_match_all))
def multi_value(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide several values of one key, and ask for all of them; the score is the share found."""
    draw = partial(magic_numbers, values=settings.needles)
    return prompts_with_needles(haystack, settings, length, draw)


@needle_task(rouge_1_recall, once_right(rouge_1_recall))
def sentence(haystack: Haystack, settings: NeedleTaskSettings, length: int) -> list[Prompt]:
    """Hide one sentence at every depth of a book, and ask for it (Kamradt 2023).

    Fu et al. 2024 use this prompt, after ``<|im_start|>``, for base models, as does Frequency
    Entropy, App. E. The score is the share of the answer's words in 50 tokens (more if a tokenizer
    needs more). Fu et al. count distinct words between white space: a complete answer, which says
    "a" twice, scores 11 of 12 there and 1 by ROUGE-1 recall.
    """
    thing = "eat a sandwich and sit in Dolores Park on a sunny day."
    quiz = Quiz(
        needles=(f"The best thing to do in San Francisco is {thing}\n",),
        question=" </book>.\nBased on the content of the book, Question: "
        "What is the best thing to do in San Francisco?\nAnswer:",
        answers=(thing,),
        new_tokens=max(50, len(haystack.encode(f" {thing}"))),
        opening="This is a very long story book: <book>",
    )
    return prompts_with_needles(haystack, settings, length, lambda *_: quiz)
