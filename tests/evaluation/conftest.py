"""A tiny corpus, a decoder that reads its tokens, and text for fits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.data.conftest import held_out
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import TaskInputs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    path = directory / "a.jsonl"
    texts = (f"Sentence {i} of a text that is {i * i} long. " for i in range(900))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(
        source="files", files=[str(path)], sequence_length=32, cache_dir=str(directory / "cache")
    )
    return prepare_corpus(config, TokenizerConfig(vocab_size=300))


@pytest.fixture
def model(tiny_decoder, corpus):
    return tiny_decoder(model={"vocab_size": corpus.tokenizer.get_vocab_size()})


def task_inputs(settings, encoder=None, documents=(), lengths=(), training_length=32, limit=99):
    """Inputs of tasks that read an encoder's texts and some documents."""
    text = SimpleNamespace(encoder=encoder, documents=documents)
    return TaskInputs(text, lengths, training_length, limit, settings)


def fit_text(*ids, count, weights=None):
    """Windows of one text or a mixture of several, each with such token ids."""
    text = held_out(*ids, weights=weights)
    key = fingerprint([[int(token) for token in of_text] for of_text in ids])
    corpus = SimpleNamespace(first_token=0, fingerprint=key)
    return FitText(HeldOut(corpus, text, (), None), count)


def values_of(task, model, batch_tokens):
    """Values of all batches of a task."""
    return [value for read in task.batches(model, batch_tokens) for value in read()]
