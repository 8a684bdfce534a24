"""Accuracies and their standard errors, of hand-made questions with known likelihoods."""

import gzip
import json
from types import SimpleNamespace

import pytest

from tests.evaluation.conftest import task_inputs, values_of
from trainer.common.errors import UserError
from trainer.config import MultipleChoiceSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation import multiple_choice
from trainer.evaluation.likelihood import Encoder, Request
from trainer.evaluation.multiple_choice import UNCONDITIONAL, multiple_choice_tasks, read_questions

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
    """Hands the texts on, as requests that are never truncated."""

    def requests(self, pairs):
        return [Request(*pair) for pair in pairs]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(
        multiple_choice,
        "log_likelihoods",
        lambda model, requests, batch_tokens, max_length: [
            (KNOWN[r.context, r.continuation], False) for r in requests
        ],
    )


def write(path, labels, choices=CHOICES):
    """The questions as request files have them, rows without a question at the end."""
    rows = []
    for first, context in [(0, None), (UNCONDITIONAL, "A")]:
        for number, (question, answers) in enumerate(choices):
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
    write(tmp_path / "t.jsonl.gz", [label, 0])
    settings = MultipleChoiceSettings(str(tmp_path), ["t"])
    (task,) = multiple_choice_tasks(task_inputs(settings, KnownEncoder(), lengths=[100]))
    values = values_of(task, SimpleNamespace(context=None), 100)
    assert [*task.titles] == ["t_acc", "t_acc_norm"]
    for key, hit in zip(task.titles, right, strict=True):
        assert [(trial, x) for trial, name, x in values if name == key] == [(0, hit), (1, 1)]
    assert len(task.trials) == 2
    (first,) = multiple_choice_tasks(task_inputs(settings, KnownEncoder(), lengths=[100], limit=1))
    assert len(first.trials) == 1


def test_the_size_of_an_answer_is_its_characters_behind_one_space(tmp_path):
    answers = [" ab", " naïve", " 東京", "x ", "  y", " "]
    path = write(tmp_path / "t.jsonl.gz", [0], [["Q", answers]])
    (question,) = read_questions(path, KnownEncoder())
    assert question.sizes == (2, 5, 2, 2, 2, 1)  # 1 at least, since it divides


def test_files_are_by_default_beside_prepared_text(tmp_path, monkeypatch):
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path))
    write(tmp_path / "benchmarks" / "t.jsonl.gz", [0, 0])
    settings = MultipleChoiceSettings(tasks=["t"])
    (task,) = multiple_choice_tasks(task_inputs(settings, KnownEncoder(), lengths=[100]))
    assert len(task.trials) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 12: expected a choice"),
        (b'{"doc_id": 0, "idx": 0, "label": 0}', "line 12: expected a choice"),
        (b'{"doc_id": 0, "idx": 0, "label": null, "request": null}', "line 12: expected a choice"),
        (None, "expected lines that gzip"),
    ],
)
def test_a_damaged_file_is_told_with_its_name_and_line(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl.gz", [0, 0])
    path.write_bytes(b"{}" if line is None else path.read_bytes() + gzip.compress(b"\n" + line))
    with pytest.raises(UserError, match=rf"t\.jsonl\.gz: {message}"):
        read_questions(path, KnownEncoder())


@pytest.mark.parametrize("label", [-1, 3])
def test_a_right_choice_that_is_missing_is_refused(tmp_path, label):
    """Benchmarks hide the labels of their test sets so, and nothing would be right."""
    with pytest.raises(UserError, match=r"t\.jsonl\.gz: a choice of doc_id 0"):
        read_questions(write(tmp_path / "t.jsonl.gz", [label, 0]), KnownEncoder())


def test_a_choice_without_a_token_is_told_with_its_file(tmp_path):
    path = write(tmp_path / "t.jsonl.gz", [0], [["Q", [" a", " "]]])
    encoder = Encoder(train_tokenizer(["Q  a"], 257, []), (), 7)
    assert len(read_questions(path, encoder)) == 1
    write(path, [0], [["Q", [" a", ""]]])
    with pytest.raises(UserError, match=r"t\.jsonl\.gz: .*doc_id 0"):
        read_questions(path, encoder)


def test_choices_are_ordered_by_their_index_and_not_by_lines(tmp_path):
    path = write(tmp_path / "t.jsonl.gz", [2, 0])
    questions = read_questions(path, KnownEncoder())
    with gzip.open(path, "rt") as file:
        lines = file.readlines()
    half = len(lines) // 2
    with gzip.open(path, "wt") as file:
        file.writelines([*lines[half - 1 :: -1], *lines[half:]])
    assert sorted(read_questions(path, KnownEncoder())) == sorted(questions)


def test_a_task_is_known_by_its_questions_and_right_choices(tmp_path):
    """Values are kept under it: after a label is mended, they are measured again."""
    settings = MultipleChoiceSettings(str(tmp_path), ["t"])

    def key(labels, question="Q2", answer=" no!"):
        choices = [CHOICES[0], [question, [" yes", answer]]]
        write(tmp_path / "t.jsonl.gz", labels, choices)
        (task,) = multiple_choice_tasks(task_inputs(settings, KnownEncoder(), lengths=[100]))
        return task.fingerprint

    keys = [key([0, 0]), key([1, 0]), key([0, 1]), key([0, 0], "Q3"), key([0, 0], answer=" no")]
    assert len({*keys}) == len(keys)
    assert key([0, 0]) == keys[0]


@pytest.mark.parametrize(("context", "tokens"), [(None, 100), (7, 7), (200, 100)])
def test_a_model_reads_no_more_than_the_length_and_its_context(
    tmp_path, monkeypatch, context, tokens
):
    write(tmp_path / "t.jsonl.gz", [0, 0])
    settings = MultipleChoiceSettings(str(tmp_path), ["t"])
    (task,) = multiple_choice_tasks(task_inputs(settings, KnownEncoder(), lengths=[100]))
    read = []

    def likelihoods(model, requests, batch_tokens, max_length):
        read.append(max_length)
        return [(0.0, False)] * len(requests)

    monkeypatch.setattr(multiple_choice, "log_likelihoods", likelihoods)
    values_of(task, SimpleNamespace(context=context), 100)
    assert read == [tokens]
