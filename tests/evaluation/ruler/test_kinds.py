"""Questions of each kind, parsed from their text by independent patterns."""

from __future__ import annotations

import math
import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.ruler.conftest import squad
from trainer.evaluation.ruler import (
    LEAST_FREQUENT,
    Essay,
    common_words,
    frequent_words,
    vocabulary,
)

SENTENCES = ["One two. Three four? Five", "Six (seven.) Eight nine!"]


def text(count, *insertions):
    return Essay(SENTENCES).with_insertions(count, insertions)


def test_words_are_counted_across_documents_and_begin_again():
    assert text(4) == "One two. Three four?"
    assert text(6) == "One two. Three four? Five Six"
    assert text(12) == "One two. Three four? Five Six (seven.) Eight nine! One two. Three"


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0.0, "X. One two. Three four? Five Six (seven.) Eight nine!"),
        (0.2, "One two. X. Three four? Five Six (seven.) Eight nine!"),
        (0.55, "One two. Three four? X. Five Six (seven.) Eight nine!"),
        (0.6, "One two. Three four? Five X. Six (seven.) Eight nine!"),
        (0.95, "One two. Three four? Five Six (seven.) X. Eight nine!"),
        (1.0, "One two. Three four? Five Six (seven.) Eight nine! X."),
    ],
)
def test_depth_is_the_share_of_five_sentences_before(depth, expected):
    assert text(9, (depth, "X.")) == expected


def test_several_insertions_and_a_sentence_that_is_cut():
    assert text(7, (0.0, "X."), (0.3, "Y."), (1.0, "Z.")) == (
        "X. One two. Y. Three four? Five Six (seven.) Z."
    )
    assert text(3, (0.5, "X."), (1.0, "Y.")) == "One two. X. Three Y."


def test_an_essay_can_be_asked_again():
    essay = Essay(SENTENCES)
    assert essay.with_insertions(9, []) == essay.with_insertions(20, [])[:51].rstrip()
    assert essay.with_insertions(2, [(0.0, "X.")]) == "X. One two."


def test_the_example_is_about_500_tokens(texts, tokenizer):
    for text, _ in texts("vt", 6144):
        example = text.split("\n\nMemorize")[0]
        assert 450 < len(tokenizer.encode(example).ids) < 530


LIST = re.compile(r"\nBelow[^\n]*\n([^\n]*)\nQuestion")


def numbered(text):
    """The words of a numbered list, whose numbers must be 1, 2, 3, and so on."""
    pairs = re.findall(r"(\d+)\. (\D+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in pairs] == list(range(1, len(pairs) + 1))
    return [word for _, word in pairs]


def test_lists_longer_than_the_vocabulary_are_of_compounds():
    text, answers = common_words(Random(0), 0, len(vocabulary()) + 1, 200_000)
    words = Counter(numbered(text.split("\n")[4]))
    assert len(words) == len(vocabulary()) + 1
    assert sorted(word for word, n in words.items() if n == 30) == sorted(answers)


@given(st.integers(LEAST_FREQUENT, 20_000), st.integers(100, 10_000))
@pytest.mark.slow
def test_the_three_answers_are_never_tied_with_the_fourth_word(units, length):
    text, answers = frequent_words(Random(units), 0, units, length)
    counts = Counter(text.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
    assert {word for word, _ in counts.most_common(4)} == {"...", *answers}
    assert sorted(counts.values())[-4] > sorted([0, *counts.values()])[-5]
    total = 6 / math.pi**2 * units * sum(1 / k**2 for k in range(1, 6))
    assert sum(counts.values()) > total - 5


def paragraphs(text):
    """The documents of a prompt, whose numbers must be 1, 2, 3, and so on."""
    context = text.split("given documents.\n\n")[1].rsplit("\n\nAnswer the question", 1)[0]
    result = re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument |$)", context, re.DOTALL)
    assert [int(number) for number, _ in result] == list(range(1, len(result) + 1))
    return [text for _, text in result]


@pytest.mark.parametrize("length", [300, 900])
def test_squad(texts, length):
    articles = [{p["context"] for p in a["paragraphs"]} for a in squad()["data"]]
    trials = texts("qa_1", length)
    # The first five questions of the file, without those that have no answer.
    names = [(a, p) for a in range(5) for p in range(4)][:5]
    places = set()
    for (a, p), (text, answers) in zip(names, trials, strict=True):
        assert text.endswith(f"Question: How many people has town {a}.{p}? Answer:")
        assert answers == (f"{a + 1}{p}0", f"{a + 1}{p}0 p")
        documents = paragraphs(text)
        places.add(next(i for i, t in enumerate(documents) if t.startswith(f"Town {a}.{p} ")))
        assert len(set(documents)) == len(documents)
        assert set(documents) <= set.union(*articles)
        # Other paragraphs of the article come before other articles.
        assert set(documents) <= articles[a] or set(documents) > articles[a]
        assert all(answer in text for answer in answers)
    assert len(places) > 1


def test_a_length_beyond_all_paragraphs_repeats_them(texts):
    for text, _ in texts("qa_2", 6144):
        counts = Counter(paragraphs(text))
        assert len(counts) == 60
        assert max(counts.values()) - min(counts.values()) == 1
