"""Methods on benchmarks: what a model scores with one, and where it chooses."""

from __future__ import annotations

import csv
import gzip
import json
import random
from types import SimpleNamespace

import pytest
import torch

from tests.model.test_decoder import published
from trainer.common.errors import UserError
from trainer.config import (
    DataConfig,
    DopeSettings,
    EvaluationRequest,
    MultipleChoiceConfig,
    WeightedRopeSettings,
)
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation import multiple_choice, weighted_rope
from trainer.evaluation.fitting import spread_evenly
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.loss import windows_with_common_ends
from trainer.runs.models import find_candidate
from trainer.workflows import benchmarks
from trainer.workflows.benchmarks import run_benchmarks
from trainer.workflows.subjects import held_out_corpus

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
    """Runs methods on a model, and returns the result with all log-likelihoods of each."""
    likelihoods = []
    compute = multiple_choice.log_likelihoods

    def spy(*arguments):
        found = compute(*arguments)
        likelihoods.append(torch.tensor([one.log_likelihood for one in found]))
        return found

    monkeypatch.setattr(multiple_choice, "log_likelihoods", spy)
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path / "cache"))

    def start(checkpoint, **changes):
        likelihoods.clear()
        config = MultipleChoiceConfig(["t"], directory=str(place / "questions"), **changes)
        text = DataConfig(source="files", files=[str(place / "text.txt")])
        chooses = {"dope", "weighted_rope", "longrope"} & set(config.parts)
        request = EvaluationRequest(
            checkpoint,
            output=str(tmp_path / "out"),
            text=text if chooses else None,
            evaluation=config,
        )
        _, directory = run_benchmarks(request, "multiple_choice")
        with (directory / "results.csv").open() as lines:
            rows = [row["value"] for row in csv.DictReader(lines)]
        notes = json.loads((directory / "facts.json").read_text())["notes"]
        each = len(rows) // len(likelihoods)
        scores = [rows[i : i + each] for i in range(0, len(rows), each)]
        return SimpleNamespace(scores=scores, notes=notes), list(likelihoods)

    return start


def test_several_processes_are_refused_since_each_would_score_everything(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="multiple_choice uses one process, and"):
        run("nothing")


@pytest.mark.parametrize(
    ("method", "rope"),
    [
        ("pi", {"rope_type": "linear", "factor": FACTOR}),
        ("yarn", {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": C}),
    ],
)
def test_a_method_scores_what_a_model_published_with_it_scores(publish, run, method, rope):
    found, (as_is, changed) = run(publish("plain"), methods=["none", method], factor=FACTOR)
    other, (expected,) = run(publish(method, **rope), max_length=C)
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)
    assert (changed - as_is).abs().max() > 0.1
    assert found.scores[1] == other.scores[0]


def test_what_is_beyond_the_training_length_alone_changes_no_short_question(publish, run):
    methods = ["none", "dynamic_ntk", "longrope", "crop"]
    found, values = run(publish("plain"), methods=methods, factor=2)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-5, atol=1e-5)
    assert all(scores == found.scores[0] for scores in found.scores)


def test_weights_of_pairs_are_chosen_on_validation_text(publish, run, place):
    model = publish("plain")
    rules = [WeightedRopeSettings(tau=0.9, alpha=0.5)]
    found, (as_is, changed) = run(model, methods=["none", "weighted_rope"], weighted_rope=rules)
    candidate = find_candidate(model)
    text = DataConfig(source="files", files=[str(place / "text.txt")])
    windows = windows_with_common_ends(held_out_corpus(text, candidate).validation, 32, [C])
    decoder = candidate.load("cpu").eval()
    ids = torch.from_numpy(windows[C][spread_evenly(4, 32)])
    weights = weighted_rope.select(decoder, ids, rules, decoder.layout)
    decoder.layout = weighted_rope.apply(decoder.layout, weights)
    questions = multiple_choice.read_questions(place / "questions/t.jsonl.gz")
    pairs = [pair for question in questions for pair in question.choices]
    encoder = Encoder(candidate.tokenizer, C, False)
    expected = multiple_choice.log_likelihoods(decoder, encoder.requests(pairs), 4096, None)
    torch.testing.assert_close(changed, torch.tensor([e.log_likelihood for e in expected]))
    assert (changed - as_is).abs().max() > 0.01
    assert any("chosen on 4 texts of 32 tokens (validation)" in note for note in found.notes)


def test_heads_are_chosen_at_the_factor_and_under_the_rescaling_before(publish, run):
    settings = DopeSettings(heads=2)
    methods = ["yarn", "yarn+dope"]
    found, (rescaled, changed) = run(publish("plain"), methods=methods, factor=2, dope=settings)
    assert (changed - rescaled).abs().max() > 0.01
    assert any("YaRN + DoPE: L" in note and "of 64 tokens" in note for note in found.notes)


def test_cropping_reads_the_last_tokens_alone_where_more_may_be_read(publish, run):
    _, (whole, cropped) = run(publish("plain"), methods=["none", "crop"], max_length=C * 4)
    _, (expected,) = run(publish("plain"), max_length=C)
    torch.testing.assert_close(cropped, expected)
    assert not torch.equal(whole, cropped)


def test_validation_text_has_to_be_as_long_as_the_factor_asks(publish, run):
    with pytest.raises(UserError, match="tokens of the validation text"):
        run(publish("plain"), methods=["dope"], factor=1000)


@pytest.mark.parametrize(("own", "bos"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("longest", "reads", "length"), [(None, None, 64), (None, 32, 32), (48, None, 48), (48, 96, 48)]
)
def test_questions_begin_as_texts_of_the_model_do(monkeypatch, own, bos, longest, reads, length):
    """With its first token where it was trained here, and no longer than it or its method reads."""
    asked = []
    monkeypatch.setattr(benchmarks, "Encoder", lambda *given: given)
    monkeypatch.setattr(benchmarks, "score_tasks", lambda *given: asked.append(given))
    layout = SimpleNamespace(training_length=64)
    candidate = SimpleNamespace(
        layout=layout, tokenizer="words", run="run" if own else None, eos=(7,)
    )
    config = MultipleChoiceConfig(max_length=longest)
    benchmarks._scores("model", candidate, SimpleNamespace(reads=reads), config)
    assert asked == [("model", ("words", length, bos, (7,)), config)]
