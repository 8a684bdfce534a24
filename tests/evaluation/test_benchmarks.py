"""Scores of benchmarks, and their paired changes."""

import pytest

from trainer.evaluation.benchmarks import Score, Scored, comparisons


def scored(model, method, *each):
    scores = [Score("t", "acc", sum(e) / len(e), None, len(e), e) for e in each]
    return Scored(model, method, {"none": "as is"}.get(method, method), model, scores)


RIGHT, WRONG, MIXED = (1.0,) * 8, (0.0,) * 8, (1.0,) * 4 + (0.0,) * 4
ALL = [
    scored("a", "none", RIGHT, MIXED),
    scored("a", "yarn", MIXED, MIXED),
    scored("b", "none", WRONG, RIGHT),
    scored("b", "yarn", WRONG, WRONG),
]


def test_a_method_is_compared_with_its_model_as_is_and_a_model_with_the_first():
    changes = [
        [None if c is None else (c.better, c.worse) for c in comparisons(scores, ALL)]
        for scores in ALL
    ]
    assert changes == [[None, None], [(0, 4), (0, 0)], [(0, 8), (4, 0)], [(0, 0), (0, 8)]]


@pytest.mark.parametrize(
    "others", [[ALL[3]], [ALL[0], ALL[3]]], ids=["alone", "another model as is"]
)
def test_nothing_is_compared_where_the_model_as_is_was_not_scored(others):
    assert comparisons(ALL[3], others) == [None, None]


def test_nothing_is_compared_without_scores_per_question():
    known = scored("a", "none", RIGHT)
    unknown = Scored("a", "pi", "PI", "a", [Score("t", "acc", 0.5, None, 8)])
    assert comparisons(unknown, [known, unknown]) == [None]


def test_nothing_is_compared_over_other_numbers_of_questions():
    shorter, longer = scored("a", "none", (1.0, 0.0)), scored("b", "none", (1.0, 0.0, 1.0))
    assert comparisons(longer, [shorter, longer]) == [None]


def test_names_and_plain_values():
    assert (ALL[0].name, ALL[1].name) == ("a", "a + yarn")
    assert Score("t", "ppl", float("inf"), None, 3, (1.0,)).to_dict() == {
        "task": "t",
        "metric": "ppl",
        "value": None,
        "standard_error": None,
        "questions": 3,
    }
