"""Prompts and limits are the benchmark's to the letter, and metrics those of its programs."""

from __future__ import annotations

from difflib import SequenceMatcher
from hashlib import sha256
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.longbench.kinds import (
    FOURTEEN,
    KINDS,
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


# Beginning of the SHA-256 of the entry in dataset2prompt.json, and the one in dataset2maxlen.json.
PUBLISHED = {
    "narrativeqa": ("aada7ed24b06abac", 128),
    "qasper": ("0fbdd123fe7f83d6", 128),
    "multifieldqa_en": ("20b4666a2de8a1f7", 64),
    "hotpotqa": ("9ec4ae308865bd0c", 32),
    "2wikimqa": ("9ec4ae308865bd0c", 32),
    "musique": ("9ec4ae308865bd0c", 32),
    "gov_report": ("91c25d585b189ced", 512),
    "qmsum": ("dca23b678fe0183b", 512),
    "multi_news": ("2af3f28c40b902e6", 512),
    "trec": ("0eff8bebdba99d91", 64),
    "triviaqa": ("00a802e6377e72fc", 32),
    "samsum": ("a68d884234907eef", 128),
    "passage_count": ("986550b6c61009c6", 32),
    "passage_retrieval_en": ("39b96b7fa52bdd2a", 32),
    "lcc": ("6a1f24cf0bb83cd9", 64),
    "repobench-p": ("ee9ec182ea5ffeb7", 64),
}


def test_wording_and_limits_are_those_published():
    found = {
        name: (sha256(kind.template.encode()).hexdigest()[:16], kind.new_tokens)
        for name, kind in KINDS.items()
    }
    assert found == PUBLISHED


def test_measures_and_ends_are_those_of_the_benchmark():
    """``dataset2metric`` of its ``eval.py``, the tasks of which that takes the first line, and the
    one for which its ``pred.py`` ends an answer with a line."""
    names = [name for name, kind in KINDS.items() if kind.metric is qa_f1]
    assert names == (
        ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"]
    )
    others = {
        rouge_l: ["gov_report", "qmsum", "multi_news", "samsum"],
        classification: ["trec"],
        count: ["passage_count"],
        retrieval: ["passage_retrieval_en"],
        code_similarity: ["lcc", "repobench-p"],
    }
    for metric, expected in others.items():
        assert [name for name, kind in KINDS.items() if kind.metric is metric] == expected
    first_line = [name for name, kind in KINDS.items() if kind.first_line]
    assert first_line == ["trec", "triviaqa", "samsum"]
    assert [name for name, kind in KINDS.items() if kind.one_line] == ["samsum"]


def test_the_default_is_every_category_but_the_synthetic_one():
    """RoPE-ID, App. A.8: 3 + 3 + 3 + 3 + 2 tasks."""
    categories = [KINDS[name].category for name in FOURTEEN]
    sizes = {category: categories.count(category) for category in categories}
    assert list(sizes.values()) == [3, 3, 3, 3, 2]
    assert set(KINDS) - set(FOURTEEN) == {"passage_count", "passage_retrieval_en"}


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum"])
def test_only_the_first_line_of_few_shot_answers_counts(name):
    assert KINDS[name].counted("\n\nDate\nQuestion: Who?\nType: Price") == "Date"
    assert KINDS["qasper"].counted("\none\ntwo") == "\none\ntwo"


@pytest.mark.parametrize(
    ("name", "text", "stops"),
    [
        ("trec", "Date", False),
        ("trec", "\n\nDate", False),
        ("trec", "\nDate\n", True),
        ("lcc", "# why\n", False),
        ("lcc", "# why\nreturn x", False),
        ("lcc", "# why\nreturn x\n", True),
        ("gov_report", "One.\n\nTwo.\n", False),
    ],
)
def test_an_answer_stops_where_more_would_not_be_scored(name, text, stops):
    kind = KINDS[name]
    assert kind.stop(text, ()) == stops
    if stops:
        classes = (["Date", "Price"],) if name == "trec" else ()
        ways = [kind.counted(text), kind.counted(text + "Price and return x")]
        assert len({kind.metric(way, "Date", *classes) for way in ways}) == 1
