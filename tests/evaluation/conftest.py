"""A tiny corpus, and a decoder that reads its tokens."""

from __future__ import annotations

import json

import pytest

from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus


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
