"""Sequences as views of a stream: cut, or filled with whole documents."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.data import plan
from trainer.data.config import TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import TrainingSamples, as_batch
from trainer.data.packing import TABLES, BestFitBlocks, _best_fit, is_packed, packing_problems
from trainer.data.prepared import open_prepared

BPE = TokenizerConfig(vocab_size=300)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(2, 32))
@settings(max_examples=100, deadline=None)
def test_best_fit_keeps_every_token_once_and_never_overfills(lengths, size):
    ends = np.cumsum(lengths).astype(np.uint32)
    seen = np.zeros(ends[-1], int)
    blocks = [
        list(zip(starts, pieces, strict=True))
        for group in _best_fit(ends, size)
        for starts, pieces in zip(*group, strict=True)
    ]
    for block in blocks:
        assert sum(length for _, length in block) <= size
        for start, length in block:
            seen[start : start + length] += 1
            # Only what is longer than a sequence is cut, and then at the sequence's length.
            begins = start in {0, *ends.tolist()}
            assert (begins and start + length in ends) or length == size or not begins
    assert (seen == 1).all()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_best_fit_is_that_of_a_plain_loop(lengths):
    """Longest first, each where the least room is left that holds it."""
    size = 20
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(size - length)
    unfilled = [
        size - sum(pieces)
        for group in _best_fit(np.cumsum(lengths).astype(np.uint32), size)
        for pieces in group[1]
    ]
    assert Counter(unfilled) == Counter(rooms)


def test_packed_sequences_hold_whole_documents_and_padding_that_does_not_count(config, monkeypatch):
    monkeypatch.setattr(plan, "UNIT", 1)
    config = replace(config, packing="best_fit", sequence_length=64)
    corpus = prepare_corpus(config, BPE)
    samples = TrainingSamples(corpus, config, seed=0)
    (blocks,) = samples.blocks
    targets, filled = blocks.read(np.arange(len(blocks)))
    end, stream = corpus.end_of_text, corpus.train
    text = [row[:n] for row, n in zip(targets, filled, strict=True)]
    assert sorted(np.concatenate(text)) == sorted(stream.windows(np.array([0]), len(stream))[0])
    assert all((row[n:] == end).all() for row, n in zip(targets, filled, strict=True))
    whole = {tuple(document) for document in stream.documents(10**9) if len(document) <= 64}
    starts = [np.split(row, np.flatnonzero(row == end)[:-1] + 1) for row in text if end in row]
    assert len(whole) > 10
    assert {tuple(piece) for row in starts for piece in row} >= whole
    batch = samples.__getitems__(list(range(8)))
    padded = batch["weights"] == 0
    assert padded.any()
    assert (batch["labels"][padded] == end).all()
    assert filled.mean() / 64 > 0.9


def test_packing_is_made_once_for_each_length_and_missing_it_is_said(config):
    corpus = prepare_corpus(config, BPE)
    (directory,) = {part.text.directory for part in corpus.parts}
    assert not is_packed(directory, 16)
    with pytest.raises(UserError, match=r"data\.packing: the blocks of .* for sequences of 16"):
        BestFitBlocks(open_prepared(directory), 16)
    prepare_corpus(replace(config, packing="best_fit"), BPE)
    assert is_packed(directory, 16)
    assert not is_packed(directory, 32)
    assert packing_problems(directory) == []
    path = directory / "best_fit-16.lengths"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert packing_problems(directory) == ["best_fit-16.lengths is not what was written"]
    os.truncate(path, len(content) // 2)
    with pytest.raises(UserError, match=rf"lengths has {len(content) // 2:,} bytes instead of"):
        BestFitBlocks(open_prepared(directory), 16)
    prepare_corpus(replace(config, packing="best_fit"), BPE)  # makes it again
    assert packing_problems(directory) == []


@pytest.mark.parametrize(
    ("table", "value"),
    [
        *(("blocks", -1), ("blocks", 2**60)),
        *(("lengths", 0), ("lengths", -5), ("lengths", 17), ("starts", -1), ("starts", 2**60)),
    ],
)
def test_a_damaged_table_gives_no_wrong_text(config, table, value):
    text = prepare_corpus(replace(config, packing="best_fit"), BPE).parts[0].text
    path = text.directory / f"best_fit-16.{table}"
    numbers = np.fromfile(path, TABLES[table])
    numbers[:] = value
    numbers.tofile(path)
    with pytest.raises(UserError, match=r"data\.packing: the blocks of .* are damaged"):
        BestFitBlocks(text, 16).read(np.array([0, 1]))


def test_an_incomplete_or_misnamed_list_of_tables_is_damaged(config):
    text = prepare_corpus(replace(config, packing="best_fit"), BPE).parts[0].text
    path = text.directory / "best_fit-16.json"
    tables = json.loads(path.read_text())["tables"]
    path.write_text(json.dumps({"tables": {"starts": tables["starts"]}}))
    path.with_name("best_fit-x.json").write_text("{}")
    assert not is_packed(text.directory, 16)
    assert packing_problems(text.directory) == [
        "best_fit-16.json is damaged",
        "best_fit-x.json is damaged",
    ]


def test_positions_restart_behind_every_end_and_first_tokens_need_not_count(config):
    config = replace(config, document_mask=True, restart_positions=True, first_token_loss=False)
    ones = np.ones((1, 6), np.float32)
    batch = as_batch(np.array([[5, 6, 0, 7, 8, 9]]), 0, 0, ones, config)
    assert batch["input_ids"].tolist() == [[0, 5, 6, 0, 7, 8]]
    assert batch["documents"].tolist() == [[1, 1, 1, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch["weights"].tolist() == [[0, 1, 1, 0, 1, 1]]
