"""LongBench's metrics of one continuation against one right answer, 0 to 1.

Each equals the benchmark's own ``metrics.py`` with the libraries in its ``requirements.txt``:
``rouge`` 1.0.1, and ``fuzzywuzzy``, which uses Python's difflib. Neither has had a release since
2021, and the parts needed are short.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
COMMENTS = ("`", "#", "//")
"""Lines with any of them are no code."""


def qa_f1(prediction: str, answer: str) -> float:
    """Return F1 of the words, ignoring case, punctuation and articles (SQuAD's)."""
    said, right = _words(prediction), _words(answer)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def rouge_l(prediction: str, answer: str) -> float:
    """Return ROUGE-L of whole summaries (Lin 2004, Sec. 3.2), as ``rouge`` counts it.

    The words of the longest common subsequences of all pairs of sentences are compared with the
    words of both texts, as sets. Sentences end at full stops, and case matters. Two sentences of a
    thousand words together exceed Python's recursion limit in ``rouge``, for which the benchmark
    counts 0; here they are compared.
    """
    said, right = _sentences(prediction), _sentences(answer)
    if not said or not right:
        return 0.0
    common = len({word for x in right for y in said for word in longest_common_subsequence(x, y)})
    precision = common / len({word for sentence in said for word in sentence})
    recall = common / len({word for sentence in right for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # `rouge` treats white space between two full stops as a sentence of one empty word.
    return [part.split() or [""] for part in text.split(".") if part]


def longest_common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """Return one of the longest common subsequences; the choice affects a union of several.

    From the ends, a common last word belongs to it; otherwise x loses its last word only if keeping
    it would cost length.
    """
    table = [[0] * (len(y) + 1)]
    for word in x:
        row = [0]
        for j, other in enumerate(y):
            row.append(table[-1][j] + 1 if word == other else max(table[-1][j + 1], row[j]))
        table.append(row)
    i, j = len(x), len(y)
    found = []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes named) if the right one is among them, else 0.

    A class whose name is part of the right one's does not count.
    """
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == answer or name not in answer]
    return 1 / len(named) if answer in named else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Return the similarity of the first line of code to the right line, in whole percents."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if is_code(line)), "")
    if line == answer or not line or not answer:
        return float(line == answer)
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def is_code(line: str) -> bool:
    """Whether the line has no mark of a comment or of formatting."""
    return not any(mark in line for mark in COMMENTS)


def count(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return :func:`count` for an answer ``Paragraph 7``."""
    found = re.search(r"Paragraph (\d+)", answer)
    return count(prediction, found[1]) if found else 0.0
