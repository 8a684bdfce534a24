"""Scores of a continuation, and when no further token can change them.

RULER (Hsieh et al. 2024) looks for the answers anywhere in the continuation, whatever their case:
for several answers it reports the share that is found (``string_match_all``), where any one of them
is right, whether one is found (``string_match_part``). Where one number is asked for, the first
number of the continuation must be it, as Mohtashami and Jaggi (2023) count pass keys. A sentence is
found in part: by the recall of its words (``rouge_1_recall``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

NUMBER = re.compile(r"[0-9]+")
WORD = re.compile(r"[^\W_]+")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """1 if the first number is an answer, digit for digit, else 0."""
    found = NUMBER.search(text)
    return float(found is not None and found[0] in answers)


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that are in the text; DroPE's success rate with several needles."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """1 if any answer is in the text, else 0.

    This is RULER's definition. lm-eval's function of this name gives the share of
    :func:`string_match_all`, which is less wherever a question has several answers.
    """
    return float(any(answer.lower() in text.lower() for answer in answers))


def rouge_1_recall(text: str, answers: Sequence[str]) -> float:
    """The share of an answer's words that are in the text, each counted as often as it is in both
    (ROUGE-1 recall, Lin 2004), whatever case and punctuation; of several answers the best."""
    said = Counter(WORD.findall(text.lower()))

    def recall(answer: str) -> float:
        wanted = Counter(WORD.findall(answer.lower()))
        return (said & wanted).total() / wanted.total()

    return max(map(recall, answers))


def after_number(text: str, answers: Sequence[str]) -> bool:
    """The :data:`Stop` of :func:`exact_number`: the first number is complete, or already wrong."""
    found = NUMBER.search(text)
    if found is None:
        return False
    return found.end() < len(text) or not any(a.startswith(found[0]) for a in answers)


def after_all(text: str, answers: Sequence[str]) -> bool:
    """The :data:`Stop` of :func:`string_match_all`: all answers are there."""
    return string_match_all(text, answers) == 1


def after_sentence(text: str, answers: Sequence[str]) -> bool:
    """The :data:`Stop` of :func:`rouge_1_recall`: all words are there, and the last is complete."""
    return rouge_1_recall(text, answers) == 1 and not text[-1:].isalnum()


def after_any(text: str, answers: Sequence[str]) -> bool:
    """The :data:`Stop` of :func:`string_match_part`: an answer is there."""
    return string_match_part(text, answers) == 1
