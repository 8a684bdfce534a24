"""Each measure against numbers worked out by hand or given by the benchmark's own program."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.longbench.metrics import (
    classification,
    code_similarity,
    count,
    longest_common_subsequence,
    qa_f1,
    retrieval,
    rouge_l,
)


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("The Paris, of France!", "Paris", 0.5),  # said: paris of france; P 1/3, R 1
        ("an apple a day", "The apple", 2 / 3),
        ("Alice Alice Boris", "alice alice", 0.8),  # words count as often as they are there
        ("'tis", "tis", 1.0),
        ("theatre", "the atre", 0.0),  # articles are whole words
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1_of_words(prediction, answer, value):
    assert qa_f1(prediction, answer) == pytest.approx(value)


@given(st.lists(st.sampled_from("xyz"), max_size=6), st.lists(st.sampled_from("xyz"), max_size=6))
def test_f1_is_the_harmonic_mean_of_precision_and_recall(said, right):
    common = 0
    rest = list(right)
    for word in said:
        if word in rest:
            rest.remove(word)
            common += 1
    expected = 0.0
    if common:
        precision, recall = common / len(said), common / len(right)
        expected = 2 * precision * recall / (precision + recall)
    assert qa_f1(" ".join(said), " ".join(right)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        # The example of Lin (2004), Sec. 3.2: the union of "w1 w2" and "w1 w3 w5" has 4 words.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 8 / 13),
        ("the cat sat", "the cat sat", 1.0),
        ("sat cat the", "the cat sat", 1 / 3),
        ("The cat", "the cat", 0.5),  # upper case is another word
        ("a a a a", "a", 1.0),  # sets of words
        ("a. b.", "b a", 1.0),  # each sentence finds its own
        ("", "a", 0.0),
        (".", "a", 0.0),
        ("a", "", 0.0),
    ],
)
def test_rouge_l(prediction, answer, value):
    assert rouge_l(prediction, answer) == pytest.approx(value, abs=1e-7)


# Computed with rouge 1.0.1, Rouge().get_scores(prediction, answer)[0]["rouge-l"]["f"].
ROUGE_1_0_1 = [
    (
        "The report says costs rose. It names three causes. None was planned.",
        "Costs rose for three causes. The report names none that was planned.",
        0.6666666616666668,
    ),
    ("one two three. two one four five", "two one three. five four one", 0.5999999950000001),
    (
        "Alice met Boris on Monday. \n\nThey spoke. . Then left",
        "On Monday Boris and Alice spoke.  They left the house. ",
        0.47619047120181407,
    ),
    ("b a c a b d. d b", "a b d a c b. c d", 0.999999995),
    ("x y z", "p q r", 0.0),
]


@pytest.mark.parametrize(("prediction", "answer", "value"), ROUGE_1_0_1)
def test_rouge_l_is_that_of_the_library_the_benchmark_uses(prediction, answer, value):
    assert rouge_l(prediction, answer) == pytest.approx(value, abs=1e-12)


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_common_subsequence_is_common_and_longest(x, y):
    def subsequences(text):
        return {c for n in range(len(text) + 1) for c in combinations(text, n)}

    common = subsequences(x) & subsequences(y)
    found = tuple(longest_common_subsequence(x, y))
    assert found in common
    assert len(found) == max(map(len, common))


CLASSES = ["Date", "Other number", "number", "Price"]


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("Date", "Date", 1.0),
        ("It is a Date or a Price", "Date", 0.5),
        ("date", "Date", 0.0),
        ("Price", "Date", 0.0),
        ("Other number", "Other number", 1.0),  # "number" is part of it
        ("Other number", "number", 0.5),
        ("", "Date", 0.0),
    ],
)
def test_classification(prediction, answer, value):
    assert classification(prediction, answer, CLASSES) == value


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("return x\nmore", "return x", 1.0),
        ("\n\n# why\n```python\n// no\nreturn x", "return x", 1.0),
        ("# only words", "return x", 0.0),
        ("", "return x", 0.0),
        ("abcd", "bcde", 0.75),  # 2 * 3 / 8
        ("abc", "abd", 0.67),  # 2 * 2 / 6, in whole percents
    ],
)
def test_code_similarity(prediction, answer, value):
    assert code_similarity(prediction, answer) == value


@given(st.text("ab( ", min_size=1, max_size=12), st.text("ab( ", min_size=1, max_size=12))
def test_code_similarity_is_within_half_a_percent_of_difflib(line, answer):
    exact = SequenceMatcher(None, line, answer).ratio()
    assert code_similarity(line, answer) == pytest.approx(exact, abs=0.00501)


def test_numbers_in_an_answer():
    assert count("There are 7 of 12, so 7.", "7") == pytest.approx(2 / 3)
    assert count("seven", "7") == 0
    assert count("17", "7") == 0
    assert retrieval("Paragraph 12", "Paragraph 12") == 1
    assert retrieval("Paragraph 1 or 12", "Paragraph 12") == 0.5
    assert retrieval("none", "Paragraph 12") == 0
