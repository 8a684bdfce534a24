"""Accuracies and their standard errors, of hand-made questions with known likelihoods."""

import gzip
import json

import pytest

from trainer.config import MultipleChoiceConfig
from trainer.evaluation import multiple_choice
from trainer.evaluation.benchmarks import mean_score
from trainer.evaluation.likelihood import Likelihood
from trainer.evaluation.multiple_choice import (
    UNCONDITIONAL,
    read_questions,
    score_questions,
    score_tasks,
)

KNOWN = {
    # The short answer is likeliest, the long one per character.
    ("Q1", " ab"): -4.0,
    ("Q1", " abcdefgh"): -8.0,
    ("Q1", " xyz"): -9.0,
    # Here both agree.
    ("Q2", " yes"): -1.0,
    ("Q2", " no!"): -3.0,
}
CHOICES = [["Q1", [" ab", " abcdefgh", " xyz"]], ["Q2", [" yes", " no!"]]]


class KnownEncoder:
    """Hands the texts on."""

    def requests(self, pairs):
        return list(pairs)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(
        multiple_choice,
        "log_likelihoods",
        lambda model, requests, batch_tokens, title: [
            Likelihood(KNOWN[r], False) for r in requests
        ],
    )


def write(path, labels):
    """The questions as request files have them, rows without a question at the end."""
    rows = []
    for first, context in [(0, None), (UNCONDITIONAL, "A")]:
        for number, (question, answers) in enumerate(CHOICES):
            rows += [
                {
                    "doc_id": first + number,
                    "idx": index,
                    "label": labels[number],
                    "request": {"context": context or question, "continuation": answer},
                }
                for index, answer in enumerate(answers)
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize(
    ("label", "right"), [(0, (1, 0)), (1, (0, 1)), (2, (0, 0))], ids=["ab", "long", "xyz"]
)
def test_each_normalisation_prefers_another_choice(tmp_path, label, right):
    questions = read_questions(write(tmp_path / "t.jsonl.gz", [label, 0]))
    scores = score_questions(None, KnownEncoder(), "t", questions, 100)
    assert [score.metric for score in scores] == ["acc", "acc_norm"]
    assert [score.value for score in scores] == [(hit + 1) / 2 for hit in right]
    assert {(score.task, score.questions) for score in scores} == {("t", 2)}


def test_tasks_and_limits_are_chosen(tmp_path):
    write(tmp_path / "a.jsonl.gz", [0, 0])
    write(tmp_path / "b.jsonl.gz", [1, 1])
    config = MultipleChoiceConfig(["b", "a"], directory=str(tmp_path))
    scores = score_tasks(None, KnownEncoder(), config)
    assert [(s.task, s.metric, s.value) for s in scores] == [
        ("b", "acc", 0.0),
        ("b", "acc_norm", 0.5),
        ("a", "acc", 1.0),
        ("a", "acc_norm", 0.5),
    ]
    assert len(read_questions(tmp_path / "a.jsonl.gz", 1)) == 1


def test_standard_error_of_a_fraction():
    """The sample variance of n zeros and ones with mean p is n p (1 - p) / (n - 1)."""
    score = mean_score("t", "acc", [1] * 30 + [0] * 70)
    assert score.value == 0.3
    assert score.standard_error == pytest.approx((0.3 * 0.7 / 99) ** 0.5)
    assert mean_score("t", "acc", [1]).standard_error is None


def test_choices_are_ordered_by_their_index_and_not_by_lines(tmp_path):
    path = write(tmp_path / "t.jsonl.gz", [2, 0])
    questions = read_questions(path)
    with gzip.open(path, "rt") as file:
        lines = file.readlines()
    half = len(lines) // 2
    with gzip.open(path, "wt") as file:
        file.writelines([*lines[half - 1 :: -1], *lines[half:]])
    read = {question.choices: question for question in read_questions(path)}
    assert [read[question.choices] for question in questions] == questions
