"""Samples by number, independent of batches, workers and restarts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainer.data.config import DataConfig, NeedlesConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import CountingSampler, TrainingSamples, as_batch, held_out_windows


@pytest.fixture(scope="module")
def corpus_and_config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    path = directory / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Sentence {i} of the text. "}) + "\n" for i in range(1200))
    )
    config = DataConfig(
        source="files",
        files=[str(path)],
        sequence_length=32,
        needles=NeedlesConfig(share=0.5, mentions=(2, 6)),
        cache_dir=str(directory / "cache"),
    )
    return prepare_corpus(config, TokenizerConfig(vocab_size=300)), config


def batches(samples, **kwargs):
    sampler = CountingSampler(total=12, batch_size=4, start=kwargs.pop("start", 0))
    return list(DataLoader(samples, batch_sampler=sampler, collate_fn=lambda b: b, **kwargs))


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(x[key], y[key]) for key in x)


def test_restart_reads_on_and_workers_change_nothing(corpus_and_config):
    samples = TrainingSamples(*corpus_and_config, seed=3)
    whole = batches(samples)
    assert_same(batches(samples, start=5), whole[5:])
    assert_same(batches(samples, num_workers=2), whole)


def test_inputs_are_targets_moved_by_one_behind_an_end_token(corpus_and_config):
    corpus, _ = corpus_and_config
    batch = TrainingSamples(*corpus_and_config, seed=3).__getitems__([0, 1, 2])
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert (batch["input_ids"][:, 0] == corpus.end_of_text).all()


def test_document_numbers_count_the_ends():
    batch = as_batch(np.array([[5, 0, 6, 7]]), 0, np.ones((1, 4), np.float32), document_mask=True)
    assert batch["input_ids"].tolist() == [[0, 5, 0, 6]]
    assert batch["documents"].tolist() == [[1, 1, 2, 2]]


def test_held_out_windows_cover_the_stream(corpus_and_config):
    stream = corpus_and_config[0].test
    windows = held_out_windows(stream, 5, 10)
    np.testing.assert_array_equal(windows[0], stream.windows(np.array([0]), 10)[0])
    np.testing.assert_array_equal(windows[-1], stream.windows(np.array([len(stream) - 10]), 10)[0])
    with pytest.raises(ValueError, match="do not fill"):
        held_out_windows(stream, 1, len(stream) + 1)
