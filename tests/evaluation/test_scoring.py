"""Scores of continuations, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.scoring import (
    after_number,
    exact_number,
    once_right,
    rouge_1_recall,
    string_match_all,
    string_match_part,
)

RIGHT = "eat a sandwich and sit in Dolores Park on a sunny day."


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 1019173. One of the", 1),
        ("\n\n1019173", 1),
        (" the number is 1019173 and not 4132801", 1),
        (" 4132801, 1019173", 0),
        (" 10191735", 0),
        (" 101917", 0),
        (" 1,019,173", 0),
        (" it is not mentioned", 0),
        ("", 0),
    ],
)
def test_the_first_number_must_be_the_answer(text, score):
    assert exact_number(text, ("1019173",)) == score


@pytest.mark.parametrize(
    ("text", "answers", "share"),
    [
        (" 12, 34, 56, and 78", ("12", "34", "56", "78"), 1),
        (" 78 and 12 12 12", ("12", "34", "56", "78"), 0.5),
        (" Paris, of course", ("PARIS", "london"), 0.5),
        ("", ("12",), 0),
    ],
)
def test_all_answers_count_equally(text, answers, share):
    assert string_match_all(text, answers) == share
    assert string_match_part(text, answers) == float(share > 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f" {RIGHT}", 12),
        (" SIT in dolores-park, eat A sandwich on a Sunny day and", 12),
        (" eat a sandwich.", 3),
        (" a a a a", 2),
        (" sunny days", 1),
        ("", 0),
    ],
)
def test_the_recall_of_a_sentence_counts_its_words(text, words):
    """Of its twelve words, "a" twice."""
    assert rouge_1_recall(text, (RIGHT,)) == pytest.approx(words / 12)
    assert rouge_1_recall(text, ("nothing of it", RIGHT)) == pytest.approx(words / 12)


@given(
    st.text("1234 .", max_size=12),
    st.text("1234 .", max_size=6),
    st.lists(st.text("1234", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_nothing_after_a_stop_changes_the_score(text, more, answers):
    pairs = (
        (after_number, exact_number),
        (once_right(string_match_all), string_match_all),
        (once_right(string_match_part), string_match_part),
        (once_right(rouge_1_recall), rouge_1_recall),
    )
    for stop, score in pairs:
        if stop(text, answers):
            assert score(text + more, answers) == score(text, answers)


@pytest.mark.parametrize(
    ("text", "stops"),
    [("", False), (" the", False), (" 123", False), (" 123.", True), (" 9", True), (" 1235", True)],
)
def test_a_number_is_read_to_its_end_unless_it_is_wrong_already(text, stops):
    assert after_number(text, ("1234",)) is stops


def test_stops_wait_for_the_answers():
    after_all, after_any = once_right(string_match_all), once_right(string_match_part)
    assert not after_all(" 12", ("12", "34"))
    assert after_all(" 34 12", ("12", "34"))
    assert not after_any(" 5", ("12", "34"))
    assert after_any(" 34", ("12", "34"))
    after_sentence = once_right(rouge_1_recall)
    assert not after_sentence("Some other words.", ("12 34",))
    assert not after_sentence("12 and 34", ("12 34",))  # may go on as 345
    assert after_sentence("12 and 34.", ("12 34",))
