"""Word extraction: which words are the most frequent ones? RULER, Sec. 3.3."""

from __future__ import annotations

import math
from random import Random
from string import ascii_lowercase

from trainer.evaluation.ruler.question import Question, compound, distinct, vocabulary

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)

COMMON = 10
LONG = 4096
"""Tokens from which a list has the full number of repetitions."""


class CommonWords:
    """Ten words of a list occur more often than all others; counted in distinct words."""

    new_tokens = 120
    least = COMMON + 1

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """Make a question: a solved example, then the list to answer for."""
        full = length >= LONG
        solved, words = _list(rng, *((40, 10, 3) if full else (20, 3, 1)))
        text, answers = _list(rng, units, *((30, 3) if full else (6, 1)))
        return Question(f"{solved} {_numbered(words)}\n{text}", tuple(answers))


def _list(rng: Random, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
    # RULER takes a larger dictionary for lists of more than 100,000 tokens.
    enough = words <= len(vocabulary())
    drawn = rng.sample(vocabulary(), words) if enough else distinct(rng, compound, words)
    common = drawn[:COMMON]
    entries = common * often + drawn[COMMON:] * seldom
    rng.shuffle(entries)
    return COMMON_TEMPLATE.format(context=_numbered(entries)), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords:
    """Made-up words, the k-th with frequency k^-2 / zeta(2); dots come first."""

    new_tokens = 50

    least = 53
    """From here on the fourth rank always has more words than the fifth."""

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """Make a question; the answers are the words after the dots."""
        kinds = max(5, (length - self.new_tokens) // 50)
        vocabulary = distinct(rng, lambda r: "".join(r.choices(ascii_lowercase, k=6)), kinds)
        vocabulary[0] = "..."
        zeta = math.pi**2 / 6
        counts = [int(units / rank**2 / zeta) for rank in range(1, kinds + 1)]
        text = [word for word, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
        rng.shuffle(text)
        return Question(FREQUENT_TEMPLATE.format(context=" ".join(text)), tuple(vocabulary[1:4]))
