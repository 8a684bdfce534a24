"""Samples by number, independent of batches, workers and restarts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from trainer.common.errors import UserError
from trainer.config import PERIOD, DataConfig, NeedlesConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import (
    BOUNDS,
    TrainingSamples,
    as_batch,
)
from trainer.data.order import assigned, sample_indices
from trainer.model.backends import BACKENDS, Mask, prepared


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


def assert_same_in_any_batch(samples):
    whole, part = samples.__getitems__([*range(48)]), samples.__getitems__([40, 20])
    assert all(torch.equal(part[key], whole[key][[40, 20]]) for key in whole)


def test_a_sample_is_the_same_in_any_batch(corpus_and_config):
    assert_same_in_any_batch(TrainingSamples(*corpus_and_config, seed=3))


def test_a_text_shorter_than_a_sequence_is_refused(corpus_and_config):
    corpus, config = corpus_and_config
    longest = min(len(part.train) for part in corpus.parts)
    assert TrainingSamples(corpus, replace(config, sequence_length=longest), seed=3).blocks
    with pytest.raises(UserError, match="tokens or more to train on"):
        TrainingSamples(corpus, replace(config, sequence_length=longest + 1), seed=3)


def test_another_seed_and_another_epoch_have_another_order(corpus_and_config):
    """Of blocks and of statements."""
    first, second = (TrainingSamples(*corpus_and_config, seed=seed) for seed in (3, 4))
    size = first.blocks[0]
    orders = [
        samples.where(np.arange(epoch * size, (epoch + 1) * size))[1]
        for samples in (first, second)
        for epoch in range(3)
    ]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert all((a == b).mean() < 0.2 for a, b in itertools.combinations(orders, 2))
    numbers = np.arange(200)
    weights = [samples.targets(numbers)[1] > 1 for samples in (first, second)]
    assert weights[0].any()
    assert (weights[0] != weights[1]).any(axis=1).mean() > 0.3


def test_a_block_has_other_statements_in_another_epoch(corpus_and_config):
    """Half of the sequences carry some, so a quarter carries none in either."""
    samples = TrainingSamples(*corpus_and_config, seed=3)
    size = samples.blocks[0]
    epochs = []
    for epoch in range(2):
        numbers = np.arange(epoch * size, (epoch + 1) * size)
        in_order = samples.where(numbers)[1].argsort()
        epochs.append(samples.targets(numbers[in_order])[0])
    differs = (epochs[0] != epochs[1]).any(axis=1)
    assert abs(differs.mean() - 0.75) < 0.1


def test_inputs_are_targets_moved_by_one_behind_an_end_token(corpus_and_config):
    corpus, _ = corpus_and_config
    batch = TrainingSamples(*corpus_and_config, seed=3).__getitems__([0, 1, 2])
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert (batch["input_ids"][:, 0] == corpus.end_of_text).all()


def test_questions_count_within_documents_alone_if_attention_stays_there(corpus_and_config):
    corpus, config = corpus_and_config
    whole, within = (
        TrainingSamples(corpus, replace(config, document_mask=masked), seed=3).targets(
            np.arange(300)
        )[1]
        for masked in (False, True)
    )
    assert (within <= whole).all()
    assert (within < whole).any()
    assert (within > 1).any()


def test_a_mixture_reads_every_block_of_each_text_once_an_epoch(corpus_and_config, tmp_path):
    _, config = corpus_and_config
    path = tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps({"text": f"Other {i}. "}) + "\n" for i in range(900)))
    config = replace(config, mixture={"a": {"weight": 3}, "b": {"files": [str(path)]}})
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    samples = TrainingSamples(corpus, config, seed=3)
    parts, blocks = samples.where(np.arange(40_000))
    for part in range(2):
        read = blocks[parts == part]
        size = samples.blocks[part]
        assert abs(len(read) / 40_000 - (0.75, 0.25)[part]) < 1e-3
        counts = np.bincount(read, minlength=size)
        assert counts.max() - counts.min() <= 1
        epochs = samples.epochs(40_000)["ab"[part]]
        assert abs(epochs - counts.mean()) < 1e-6
    assert_same_in_any_batch(samples)


def test_parts_of_a_mixture_with_equal_text_are_read_in_orders_of_their_own(corpus_and_config):
    corpus, config = corpus_and_config
    twice = replace(corpus, parts=tuple(replace(corpus.parts[0], name=name) for name in "ab"))
    samples, alone = (TrainingSamples(texts, config, seed=3) for texts in (twice, corpus))
    counters = np.arange(PERIOD)  # which has each number of both
    parts, numbers = assigned(3, counters, samples.quotas)
    _, blocks = samples.where(counters)
    first, second = (blocks[parts == part][numbers[parts == part].argsort()] for part in range(2))
    assert len(first) == len(second) == PERIOD // 2
    assert (first == second).mean() < 0.1
    numbers = np.arange(PERIOD // 2)
    np.testing.assert_array_equal(first, sample_indices(3, numbers, samples.blocks[0]))
    np.testing.assert_array_equal(first, alone.where(numbers)[1])


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.booleans())
def test_bounds_are_where_documents_begin_in_all_rows(tokens, many):
    """Token 0 ends a document. Those of a GPU's kernels, counted here so that nothing waits for it,
    and filled up with empty documents."""
    targets = np.array(tokens, dtype=np.int64).reshape(2, 6).repeat(40 if many else 1, axis=0)
    batch = as_batch(targets, 0, 0, np.ones(targets.shape, dtype=np.float32), document_mask=True)
    documents = batch["documents"]
    mask = Mask(documents=documents)
    mask = prepared(BACKENDS["flash"].attend, mask, documents.shape, 0, documents.device)
    expected = mask.bounds.tolist()
    bounds = batch["bounds"].tolist()
    assert bounds[: len(expected)] == expected
    assert set(bounds[len(expected) :]) <= {targets.size}
    assert len(bounds) % BOUNDS == 0
    longest = max(np.diff(expected))
    assert longest <= batch["longest"] < 2 * longest
    assert batch["longest"].bit_count() == 1


def test_as_many_documents_as_bounds_end_with_the_last_token():
    targets = np.zeros((1, BOUNDS), dtype=np.int64)
    batch = as_batch(targets, 0, 0, np.ones(targets.shape, dtype=np.float32), document_mask=True)
    assert batch["bounds"].tolist() == [*range(BOUNDS), *[BOUNDS] * BOUNDS]


@pytest.fixture(scope="module")
def llama_corpus(corpus_and_config, tmp_path_factory):
    """The text with a tokenizer that puts ``<s>`` before every text, as Llama's do."""
    corpus, config = corpus_and_config
    tokenizer = Tokenizer.from_str(corpus.tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", first)]
    )
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    tokenizer.save(str(path))
    needles = replace(config.needles, share=0.0)
    config = replace(config, needles=needles, document_mask=True)
    return prepare_corpus(config, TokenizerConfig(path=str(path))), config, first


def test_sequences_begin_with_the_token_that_the_tokenizer_puts_before_texts(llama_corpus):
    corpus, config, first = llama_corpus
    assert corpus.first_token == first != corpus.end_of_text
    samples = TrainingSamples(corpus, config, seed=3)
    batch = samples.__getitems__([*range(48)])
    inputs, ends = batch["input_ids"], batch["input_ids"] == corpus.end_of_text
    assert (inputs[:, 0] == first).all()
    assert torch.equal(inputs[:, 1:], batch["labels"][:, :-1])
    assert not (inputs[:, 1:] == first).any()
    assert torch.equal(batch["documents"], 1 + ends.cumsum(dim=1))
