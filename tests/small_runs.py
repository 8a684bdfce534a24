"""A tiny corpus, shapes of small models, and a function that trains them."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from trainer.data.corpus import prepare_corpus
from trainer.runs.parsing import merged, parse
from trainer.training.fit import train, user_callbacks

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Shape of a small model."""
SMALLEST = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def graphs_as_they_are(monkeypatch):
    """Compiled blocks are captured as graphs, forward and backward, and run without code made for
    them, which takes most of a minute; tests/training/test_run.py trains with that code too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Plain values of a run of a dozen steps that drops half way."""
    directory = tmp_path_factory.mktemp("text")
    path = directory / "a.jsonl"
    texts = (f"Sentence {i} of a text that is {i * i} long. " for i in range(900))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "name": "tiny",
        "model": {
            **SMALLEST,
            "initializer": "fan_in",
            "qk_norm": {"when": "after_drop"},
        },
        "data": {
            "source": "files",
            "files": [str(path)],
            "sequence_length": 32,
            "cache_dir": str(directory / "cache"),
            "needles": {"share": 0.5, "mentions": [2, 6]},
        },
        "tokenizer": {"vocab_size": 300},
        "schedule": {"warmup_steps": 2},
        "drop": {"at": 6, "effect_sequences": 4, "schedule": {"warmup_steps": 2}},
        "trainer": {
            "max_steps": 12,
            "batch_size": 4,
            "threads": 1,
            "log_every": 2,
            "checkpoint_every": 3,
            "keep_checkpoints": 100,
        },
    }


def trained_in(directory, base, **changes):
    """The configuration and the last checkpoint of a run of ``base`` with changes."""
    run = parse(merged({**base, "run_dir": str(directory)}, changes))
    directory.mkdir(exist_ok=True)
    corpus = prepare_corpus(run.config.data, run.config.tokenizer)
    return run.config, train(run, corpus, callbacks=user_callbacks(run.config))


@pytest.fixture
def run(base, tmp_path):
    """Train with changes to ``base``; returns the configuration and the last checkpoint."""

    def go(name="run", **changes):
        return trained_in(tmp_path / name, base, **changes)

    return go


@pytest.fixture(scope="session")
def finished(base, tmp_path_factory):
    """The run of ``base`` as it is, trained once for all who change nothing in its directory."""
    return trained_in(tmp_path_factory.mktemp("finished") / "run", base)
