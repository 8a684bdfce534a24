"""Prompts, scores of their continuations, and conditions that end an answer early.

An answer ends when no further token can change its score.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.common.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One trial.

    ``tokens``: the prompt, beginning of text included. ``answers``: right ones, or what else score
    and stop are given. ``new_tokens``: most tokens of an answer. ``depth``: place of the (first)
    needle, 0 at the beginning of the text, 1 at its end. ``group``: a number that trials with a
    common prefix share. ``label``: key to average results by, a category or a length bucket.
    """

    tokens: Sequence[int]
    answers: tuple[str, ...]
    new_tokens: int
    depth: float | None = None
    group: int | None = None
    label: str = ""


Score = Callable[[str, Sequence[str]], float]
"""Score of a continuation, 0 to 1, given the right answers."""

Stop = Callable[[str, Sequence[str]], bool]
"""Whether a continuation can end here, because no further token changes its score."""


def check_room(spare: int, name: str, length: int) -> None:
    """Raise a UserError if the shortest prompt of ``name`` and its answer leave ``spare`` < 0 of
    ``length`` tokens."""
    if spare < 0:
        text = f"expected at least {length - spare} tokens for {name}, got {length}"
        raise UserError(f"evaluation.lengths: {text}")


NUMBER = re.compile(r"[0-9]+")
WORD = re.compile(r"[^\W_]+")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number is an answer, digit for digit, else 0 (Mohtashami and Jaggi
    2023)."""
    number = NUMBER.search(text)
    return float(number is not None and number[0] in answers)


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Return the share of answers in the text, ignoring case (RULER, Hsieh et al. 2024); DroPE's
    success rate with several needles."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """Return 1 if any answer is in the text, else 0 (RULER; lm-eval's function of this name gives
    the share of :func:`string_match_all`)."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def rouge_1_recall(text: str, answers: Sequence[str]) -> float:
    """Return the share of an answer's words that are in the text, with multiplicity, for the best
    answer: ROUGE-1 recall (Lin 2004), ignoring case and punctuation."""
    words = Counter(WORD.findall(text.lower()))

    def recall(answer: str) -> float:
        wanted = Counter(WORD.findall(answer.lower()))
        return (words & wanted).total() / max(wanted.total(), 1)

    return max(map(recall, answers))


def after_number(text: str, answers: Sequence[str]) -> bool:
    """Stop after the first number is complete or already wrong; for :func:`exact_number`."""
    number = NUMBER.search(text)
    if number is None:
        return False
    return number.end() < len(text) or not any(a.startswith(number[0]) for a in answers)


def once_right(score: Score) -> Stop:
    """Stop as soon as the score is 1 and its last word complete; for a ``score`` that further words
    do not reduce."""

    def stop(text: str, answers: Sequence[str]) -> bool:
        if score(text, answers) < 1:
            return False
        return score(f"{text}0", answers) == 1  # the last word is not the beginning of another

    return stop
