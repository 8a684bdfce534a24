"""Which part of the text each reader sees: every split of this corpus is of words of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.config import (
    AnalysisConfig,
    AttenuationSettings,
    EvaluationConfig,
    NeedleTaskSettings,
    RulerSettings,
    TemperatureSettings,
)
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.data.prepared import document_hash
from trainer.data.tokenizer import SpecialTokens
from trainer.positional.config import PositionalConfig, build_layout
from trainer.runs.directory import plain
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of
from trainer.training.measurements import benchmark_tasks
from trainer.workflows import evaluate
from trainer.workflows.analyze import choice_texts, page_texts
from trainer.workflows.evaluate import measure_models

WORDS = {"train": "appel rivur stoon", "validation": "quarz quivir", "test": "zebbra zefyr"}
SHARES = {"train": (0.0, 0.8, 3200), "validation": (0.8, 0.9, 400), "test": (0.9, 1.0, 400)}
"""Of the hashes, from and to, and how many documents have one in between."""


def documents_of(split):
    """Documents of one size, with hashes that belong to the split."""
    low, high, count = SHARES[split]
    documents, number = [], 0
    while len(documents) < count:
        text = f"{WORDS[split]} {number:06d}. ".ljust(40, "-")
        if low <= document_hash(text) / 2**64 < high:
            documents.append(text)
        number += 1
    return documents


@pytest.fixture(scope="module")
def config(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("marked")
    path = directory / "a.jsonl"
    texts = [text for split in WORDS for text in documents_of(split)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {
        "files": [str(path)],
        "validation": 0.1,
        "test": 0.1,
        "cache_dir": str(directory / "cache"),
    }
    benchmarks = {"every": 2, "tasks": ["perplexity", "statements"], "lengths": [1, 4], "limit": 4}
    others = {"tokenizer": {"vocab_size": 600}, "run_dir": "x"}
    return parse(merged(base, {"data": data, "benchmarks": benchmarks, **others})).config


@pytest.fixture(scope="module")
def corpus(config):
    return prepare_corpus(config.data, config.tokenizer)


@pytest.fixture
def seen(corpus):
    """The splits whose words stand in rows of tokens, or in texts."""

    def look(rows):
        texts = rows if isinstance(rows[0], str) else corpus.tokenizer.decode_batch(rows)
        text = " ".join(texts)
        return {split for split, words in WORDS.items() if any(w in text for w in words.split())}

    return look


def test_training_and_the_tokenizer_see_the_training_text_alone(config, corpus, seen):
    targets, _ = TrainingSamples(corpus, config.data, 0).targets(np.arange(400))
    assert seen(targets) == {"train"}
    held_out = "".join(WORDS["validation"] + WORDS["test"])
    known = [token.strip("Ġ") for token in corpus.tokenizer.get_vocab()]
    assert not [token for token in known if len(token) > 2 and token in held_out]
    assert "appel" in known


def test_what_looks_at_a_run_meanwhile_sees_validation_text(config, corpus, seen):
    phase = phases_of(config)[0]
    probe = torch.from_numpy(corpus.mixed(phase.data).probe(4, phase.length))
    assert seen(probe[:, 1:].numpy()) == {"validation"}
    *perplexities, short, long = benchmark_tasks(parse(plain(config)), corpus)
    for perplexity, statements in zip(perplexities, (short, long), strict=True):
        assert seen(perplexity.batches.args[0]) == {"validation"}
        # Between the statements of a short prompt there may be no whole word.
        assert seen(statements.batches.args[0].prompts) <= {"validation"}
    assert seen(long.batches.args[0].prompts) == {"validation"}


def test_methods_are_fitted_on_validation_text_and_all_that_is_reported_is_on_test_text(
    config, corpus, seen, monkeypatch, tmp_path
):
    """Haystacks too, of every task that has some."""
    layout = build_layout(
        PositionalConfig(), num_layers=2, num_key_value_heads=1, head_dim=16, training_length=32
    )
    candidate = SimpleNamespace(
        name="tiny", fingerprint="", config=replace(config.model, vocab_size=600), layout=layout,
        tokens=SpecialTokens(None, None, None, 0, frozenset()), run=config, computed_by=None,
        training_length=32,
    )  # fmt: skip
    asked = {}

    def planned(models, methods, tasks, setup):
        asked.update(tasks=tasks, text=setup.text)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "measure", planned)
    evaluation = EvaluationConfig(
        lengths=[125, 200],
        methods=["none", "temperature", "dope"],
        tasks=["perplexity", "statements", "multi_key", "ruler"],
        windows=4,
        fit_windows=4,
        needles=NeedleTaskSettings(trials=4, needles=2),
        ruler=RulerSettings(trials=2, tasks=["niah_single_2"]),
        temperature=TemperatureSettings(models="all"),
    )
    with pytest.raises(KeyboardInterrupt):
        measure_models(
            "r", [candidate], evaluation, evaluate.held_out_of(corpus, candidate), tmp_path
        )
    assert seen(asked["text"].windows(6400)) == {"validation"}
    inputs = [task.batches.args[0] for task in asked["tasks"]]  # each task at two lengths
    for windows, trials, *prompted in (inputs[::2], inputs[1::2]):
        assert seen(windows) == {"test"}
        assert seen(trials.prompts) == {"test"}
        assert len(prompted) == 2
        for prompts in prompted:
            assert seen([prompt.tokens for prompt in prompts]) == {"test"}


def test_analyses_look_at_test_text(corpus, seen):
    layout = SimpleNamespace(training_length=32)
    candidate = SimpleNamespace(
        layout=layout, tokens=SpecialTokens(None, None, None, 0, frozenset())
    )
    config = replace(AnalysisConfig(), length=64, texts=4)
    ids = page_texts(corpus, config, candidate)
    assert seen(ids.numpy()) == {"test"}
    assert choice_texts(corpus, config, candidate, ids) is None


def test_pairs_are_chosen_on_validation_text_where_that_is_asked_for(corpus, seen):
    layout = SimpleNamespace(training_length=32)
    candidate = SimpleNamespace(
        layout=layout, tokens=SpecialTokens(None, None, None, 0, frozenset())
    )
    settings = AttenuationSettings(choice="validation")
    page = torch.zeros(3, 64)
    config = replace(AnalysisConfig(), attenuation=settings)
    ids = choice_texts(corpus, config, candidate, page)
    assert ids.shape == (3, 64)
    assert seen(ids.numpy()) == {"validation"}
