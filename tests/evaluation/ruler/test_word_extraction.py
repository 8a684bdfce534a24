"""The words of a prompt are counted."""

import math
import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.ruler.question import vocabulary
from trainer.evaluation.ruler.word_extraction import CommonWords, FrequentWords

LIST = re.compile(r"\nBelow[^\n]*\n([^\n]*)\nQuestion")


def numbered(text):
    """The words of a numbered list, whose numbers must be 1, 2, 3, and so on."""
    pairs = re.findall(r"(\d+)\. (\D+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in pairs] == list(range(1, len(pairs) + 1))
    return [word for _, word in pairs]


@pytest.mark.parametrize(
    ("length", "often", "seldom", "example"), [(2048, 6, 1, (3, 1, 20)), (6144, 30, 3, (10, 3, 40))]
)
def test_common_words_are_those_that_appear_most_often(texts, length, often, seldom, example):
    for text, answers, _ in texts("cwe", length):
        solved, asked = text.split("\nBelow is a numbered list")
        words = Counter(numbered(asked.split("\n")[1]))
        assert sorted(answers) == sorted(word for word, n in words.items() if n == often)
        assert Counter(words.values()) == {often: 10, seldom: len(words) - 10}
        assert len(words) > 10
        listed, question = solved.split("\n")[1:]
        words = Counter(numbered(listed))
        common = [word for word, n in words.items() if n == example[0]]
        assert Counter(words.values()) == {example[0]: 10, example[1]: example[2] - 10}
        assert sorted(numbered(question.split("are: ")[1])) == sorted(common)


def test_lists_longer_than_the_vocabulary_are_of_compounds():
    question = CommonWords().question(Random(0), 0, len(vocabulary()) + 1, 200_000)
    words = Counter(numbered(question.text.split("\n")[4]))
    assert len(words) == len(vocabulary()) + 1
    assert sorted(word for word, n in words.items() if n == 30) == sorted(question.answers)


@pytest.mark.parametrize("length", [1024, 6144])
def test_frequent_words_are_those_behind_the_dots(texts, length):
    for text, answers, _ in texts("fwe", length):
        coded = text.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
        (dots, most), *ranked = Counter(coded).most_common()
        assert dots == "..."
        assert tuple(word for word, _ in ranked[:3]) == answers
        assert ranked[2][1] > ranked[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        # A zeta distribution: the k-th word k^-2 as often as the first, up to rounding down.
        for rank, (_, count) in enumerate(ranked, 2):
            assert count == pytest.approx(most / rank**2, abs=1)


@given(st.integers(FrequentWords.least, 20_000), st.integers(100, 10_000))
def test_the_three_answers_are_never_tied_with_the_fourth_word(units, length):
    question = FrequentWords().question(Random(units), 0, units, length)
    counts = Counter(question.text.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
    assert {word for word, _ in counts.most_common(4)} == {"...", *question.answers}
    assert sorted(counts.values())[-4] > sorted([0, *counts.values()])[-5]
    total = 6 / math.pi**2 * units * sum(1 / k**2 for k in range(1, 6))
    assert sum(counts.values()) > total - 5
