"""Methods on benchmarks: what a model scores with one, and where it chooses."""

from __future__ import annotations

import gzip
import json
import random

import pytest
import torch

from tests.model.test_decoder import published
from trainer.analysis import weighted_rope
from trainer.analysis.frequency_entropy import choose_factors
from trainer.config import (
    DataConfig,
    EvaluationConfig,
    EvaluationRequest,
    MultipleChoiceSettings,
    WeightedRopeSettings,
)
from trainer.data.corpus import held_out_windows
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation import multiple_choice
from trainer.evaluation.likelihood import Encoder
from trainer.runs.models import find_model
from trainer.workflows import evaluate
from trainer.workflows.evaluate import held_out_corpus

C, FACTOR = 32, 4
WORDS = ["some", "text", "and", "more", "of", "it", "that", "goes", "on", "it", "ends"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Questions in ``questions/``, and a text."""
    directory = tmp_path_factory.mktemp("benchmarks")
    draw = random.Random(0)
    rows = [
        {
            "doc_id": number,
            "idx": index,
            "label": number % 3,
            "request": {
                "context": " ".join(draw.choices(WORDS, k=40)),
                "continuation": " " + " ".join(draw.choices(WORDS, k=2)),
            },
        }
        for number in range(12)
        for index in range(3)
    ]
    (directory / "questions").mkdir()
    with gzip.open(directory / "questions/t.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (directory / "text.txt").write_text(" ".join(draw.choices(WORDS, k=20_000)))
    return directory


@pytest.fixture
def publish(place, tiny_decoder):
    """Writes the same weights under a name, with another rotation."""

    def write(name, **rope):
        model = published(
            "Llama",
            tiny_decoder(model={"vocab_size": 300}),
            max_position_embeddings=C * FACTOR if rope else C,
        )
        model.config.rope_parameters |= rope
        model.save_pretrained(place / name)
        train_tokenizer([" ".join(WORDS)], 300, ()).save(str(place / name / "tokenizer.json"))
        return str(place / name)

    return write


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """Runs methods on a model, and returns the report with all log-likelihoods of each."""
    likelihoods = []
    compute = multiple_choice.log_likelihoods

    def spy(*arguments):
        found = compute(*arguments)
        likelihoods.append(torch.tensor([x for x, _ in found]))
        return found

    monkeypatch.setattr(multiple_choice, "log_likelihoods", spy)
    monkeypatch.setattr(evaluate, "write_renderings", lambda report, output: None)
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path / "cache"))

    def start(checkpoint, **changes):
        likelihoods.clear()
        questions = MultipleChoiceSettings(str(place / "questions"), ["t"])
        changes = {"methods": ["none"], "lengths": [1], "batch_tokens": 4096, **changes}
        config = EvaluationConfig(tasks=["multiple_choice"], multiple_choice=questions, **changes)
        text = DataConfig(source="files", files=[str(place / "text.txt")])
        output = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        request = EvaluationRequest(checkpoint, output=output, text=text, evaluation=config)
        report, _ = evaluate.evaluate_lengths(request)
        return report, list(likelihoods)

    return start


def scores(report, method):
    rows = report.rows[report.rows.method == method]
    return dict(zip(rows.task, rows.value, strict=True))


@pytest.mark.parametrize(
    ("method", "rope"),
    [
        ("pi", {"rope_type": "linear", "factor": FACTOR}),
        ("yarn", {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": C}),
    ],
)
def test_a_method_scores_what_a_model_published_with_it_scores(publish, run, method, rope):
    longest = {"tokens": [C * FACTOR]}
    found, (as_is, changed) = run(publish("plain"), methods=["none", method], **longest)
    other, (expected,) = run(publish(method, **rope), **longest)
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)
    assert (changed - as_is).abs().max() > 0.1
    assert scores(found, method) == scores(other, "none")
    assert {*scores(found, method)} == {"t_acc", "t_acc_norm", "mean"}


def test_weights_of_pairs_are_chosen_on_validation_text(publish, run, place):
    model = publish("plain")
    rules = [WeightedRopeSettings(tau=0.9, alpha=0.5)]
    found, (as_is, changed) = run(model, methods=["none", "weighted_rope"], weighted_rope=rules)
    candidate = find_model(model)
    text = DataConfig(source="files", files=[str(place / "text.txt")])
    windows = held_out_windows(held_out_corpus(text, candidate).validation, 4, C)
    decoder = candidate.load("cpu").eval()
    ids = torch.from_numpy(windows)
    weights = choose_factors(decoder, ids, rules, decoder.layout)
    decoder.layout = weighted_rope.apply(decoder.layout, weights)
    encoder = Encoder(candidate.tokens.tokenizer, (), 0)
    questions = multiple_choice.read_questions(place / "questions/t.jsonl.gz", encoder)
    requests = [request for question in questions for request in question.requests]
    expected = multiple_choice.log_likelihoods(decoder, requests, 4096, C)
    torch.testing.assert_close(changed, torch.tensor([x for x, _ in expected]))
    assert (changed - as_is).abs().max() > 0.01
    assert any("chosen on 4 texts of 32 tokens (validation)" in note for note in found.notes)


def test_cropping_reads_the_last_tokens_alone_where_more_may_be_read(publish, run):
    _, (whole, cropped) = run(publish("plain"), methods=["none", "crop"], lengths=[4])
    _, (expected,) = run(publish("plain"))
    torch.testing.assert_close(cropped, expected)
    assert not torch.equal(whole, cropped)
