"""Documents become one text that is opened between sentences only."""

import pytest

from trainer.evaluation.ruler.essay import Essay

DOCUMENTS = ["One two. Three four? Five", "Six (seven.) Eight nine!"]


def text(count, *insertions):
    return Essay(DOCUMENTS).with_insertions(count, insertions)


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
    essay = Essay(DOCUMENTS)
    assert essay.with_insertions(9, []) == essay.with_insertions(20, [])[:51].rstrip()
    assert essay.with_insertions(2, [(0.0, "X.")]) == "X. One two."
