"""Prepared text: its tokens compared with a plain loop, interrupted and resumed."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.data.conftest import write_texts
from trainer.common.errors import UserError
from trainer.common.registry import Registry
from trainer.config import DataConfig, TokenizerConfig
from trainer.data import prepared, sources
from trainer.data.corpus import prepare_corpus
from trainer.data.prepared import (
    Manifest,
    cut,
    directory_of,
    document_hash,
    is_prepared,
    open_prepared,
    prepare,
    request_of,
    split_bounds,
    split_of,
    windows_at,
)
from trainer.data.sources import cache_directory, text_source
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer

BPE = TokenizerConfig(vocab_size=300)


def bytes_of(directory):
    return [(directory / f"{split}.bin").read_bytes() for split in prepared.SPLITS]


def texts_of(config):
    paths = sorted((cache_directory(config).parent / "texts").glob("*.jsonl"))
    return [json.loads(line)["text"] for path in paths for line in path.open()]


def test_every_split_is_its_documents_in_order_with_an_end_behind_each(config):
    directory = prepare(config, BPE)
    text, manifest = open_prepared(directory), Manifest.load(directory)
    expected = {split: [] for split in prepared.SPLITS}
    for document in texts_of(config):
        ids = text.special.tokenizer.encode(document).ids
        expected[split_of(document, manifest.bounds)] += [*ids, text.special.end]
    for split, ids in expected.items():
        assert np.fromfile(directory / f"{split}.bin", "<u2").tolist() == ids
        stream = getattr(text, split)
        assert len(stream) == len(ids) == manifest.tokens[split]
        starts = np.array([0, 3, len(ids) - 20])
        expected_windows = [ids[start : start + 20] for start in starts]
        np.testing.assert_array_equal(windows_at(stream, starts, 20), expected_windows)


@pytest.mark.parametrize("saved", [1, 10**6])
def test_an_interrupted_preparation_resumes_to_the_same_bytes(config, monkeypatch, tmp_path, saved):
    """In small batches, and the expected bytes in one."""
    expected = bytes_of(prepare(config, BPE))
    monkeypatch.setattr(prepared, "TOKENS_PER_SAVE", saved)
    monkeypatch.setattr(prepared, "BATCH_CHARACTERS", 500)
    other = replace(config, cache_dir=str(tmp_path / "other"))
    batches, encoded = prepared._batches, []

    def interrupted(texts):
        for batch in batches(texts):
            if len(encoded) == 9:
                raise KeyboardInterrupt
            encoded.append(batch)
            yield batch

    monkeypatch.setattr(prepared, "_batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(other, BPE)
    directory = directory_of(other, BPE)
    assert not is_prepared(directory)
    assert (Manifest.load(directory).read > 0) == (saved == 1)
    with pytest.raises(UserError, match="expected complete prepared text"):
        open_prepared(directory)
    monkeypatch.setattr(prepared, "_batches", batches)
    if saved == 1:  # a file that lost what its record says is not filled with zeros
        written = (directory / "train.bin").read_bytes()
        (directory / "train.bin").write_bytes(written[:10])
        with pytest.raises(UserError, match=r"train\.bin: shorter than its record"):
            prepare(other, BPE)
        (directory / "train.bin").write_bytes(written)
    assert bytes_of(prepare(other, BPE)) == expected
    monkeypatch.setattr(prepared, "_write", None)  # what is complete is not written again
    assert prepare(other, BPE) == directory


@given(
    st.lists(st.integers(1, 2000), min_size=3, max_size=60),
    st.floats(0.01, 0.3),
    st.floats(0.01, 0.3),
)
@settings(max_examples=50, deadline=None)
def test_bounds_are_those_of_documents_sorted_by_hash(lengths, validation, test):
    """Against a plain loop: the documents in order of their hashes, a split begun where its share
    begins, each with a document at least, however long the others are."""
    documents = [f"{i:04d}" + "x" * length for i, length in enumerate(lengths)]
    bounds = split_bounds(documents * 2, validation, test)  # copies change nothing
    total, before, splits = sum(map(len, documents)), 0, [0]
    for rank, text in enumerate(sorted(documents, key=document_hash), start=1 - len(documents)):
        share = sum(before >= total * (1 - held_out) for held_out in (validation + test, test))
        needed = 2 + rank  # so that the others can hold a document of each later split
        splits.append(min(max(share, needed), splits[-1] + 1) if before else 0)
        before += len(text)
    chosen = [("train", "validation", "test")[split] for split in splits[1:]]
    assert [split_of(text, bounds) for text in sorted(documents, key=document_hash)] == chosen
    assert set(chosen) == {"train", "validation", "test"}


def test_of_long_text_the_expected_share_is_held_out(monkeypatch):
    monkeypatch.setattr(prepared, "MEASURED_CHARACTERS", 100)
    texts = [f"Document {i}" for i in range(20_000)]
    bounds = split_bounds(texts, 0.1, 0.3)
    splits = [split_of(text, bounds) for text in texts]
    assert abs(splits.count("validation") / 20_000 - 0.1) < 0.015
    assert abs(splits.count("test") / 20_000 - 0.3) < 0.015


@pytest.mark.parametrize("files", [1, 3, 20])
def test_few_files_of_text_are_cut_so_that_their_shares_are_held_out(files, tmp_path):
    for number in range(files):
        lines = (f"Line {i} of text {number}.\n" for i in range(2000))
        (path := tmp_path / f"{number}.txt").write_text("".join(lines))
    names = [str(tmp_path / f"{number}.txt") for number in range(files)]
    config = DataConfig(source="files", files=names, cache_dir=str(tmp_path / "cache"))
    tokens = Manifest.load(prepare(config, BPE)).tokens
    total = sum(tokens.values())
    assert abs(tokens["validation"] / total - 0.03) < 0.011
    assert abs(tokens["test"] / total - 0.07) < 0.011
    path.write_text("x")
    with pytest.raises(UserError, match="expected three different documents or more, got 1"):
        prepare(replace(config, files=[str(path)]), BPE)


def of_sizes(tmp_path, sizes, **shares):
    """Text of documents of these sizes."""
    (tmp_path / "texts").mkdir(exist_ok=True)
    words = (f"{i:05d} " for i in itertools.count())
    lines = [json.dumps({"text": "".join(itertools.islice(words, size))}) for size in sizes]
    (tmp_path / "texts" / "a.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / "texts")]
    return DataConfig(source="files", files=files, cache_dir=str(tmp_path / "cache"), **shares)


@pytest.mark.parametrize(
    ("sizes", "shares", "problems"),
    [
        ([20] * 400, {}, []),
        ([20] * 400, {"validation": 0.025}, []),  # ten documents
        ([20] * 400, {"validation": 0.0225}, ["validation split has only 9 documents"]),
        ([20] * 400, {"validation": 0.009}, ["validation split has only 3 documents"]),
        ([20] * 160, {"validation": 0.3, "test": 0.5}, []),
        # The longest document is in one of the splits.
        ([2] * 200 + [2000], {"validation": 0.3, "test": 0.3}, ["expected 0.3 of the text, got 0"]),
        ([20] * 100, {"validation": 0.001, "test": 0.3}, ["expected 0.001 of the text, got 0.0"]),
        ([3000], {}, ["the validation split has only", "the test split has only"]),  # a book
    ],
)
def test_shares_that_documents_make_impossible_are_said(tmp_path, caplog, sizes, shares, problems):
    config = of_sizes(tmp_path, sizes, **shares)
    prepare(config, BPE)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert bool(warnings) == bool(problems)
    for problem in problems:
        assert any(problem in warning for warning in warnings)
    caplog.clear()
    prepare(config, BPE)
    assert not caplog.records


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.6, 0.9), (1, 0), (0.1, 0), (0, 0.1)])
def test_shares_that_leave_a_split_without_text_are_refused(config, shares):
    validation, test = shares
    with pytest.raises(UserError, match=r"data\.validation, data\.test: expected shares above 0 "):
        prepare(replace(config, validation=validation, test=test), BPE)


def test_the_tokenizer_sees_no_held_out_document(config, monkeypatch):
    seen = []

    def train(texts, *_):
        seen.extend(texts)
        return train_tokenizer(seen, 300, [])

    monkeypatch.setattr(prepared, "train_tokenizer", train)
    directory = prepare(config, BPE)
    bounds = Manifest.load(directory).bounds
    assert seen == [text for text in texts_of(config) if split_of(text, bounds) == "train"]


def test_the_tokenizer_sees_as_many_characters_as_it_needs():
    assert [*prepared._up_to(["ab", "cd", "ef"], 4)] == ["ab", "cd"]
    assert [*prepared._up_to(["ab", "cd", "ef"], 5)] == ["ab", "cd", "ef"]


def test_a_few_documents_are_cut_at_the_longest_of_any_text_too(config, monkeypatch):
    path = cache_directory(config).parent / "texts" / "0.jsonl"
    path.write_text(json.dumps({"text": " ".join(map(str, range(4000)))}))
    monkeypatch.setattr(prepared, "LONGEST", 150)
    only = replace(config, files=[str(path)])
    assert Manifest.load(prepare(only, BPE)).longest == 150


def test_a_dataset_is_read_at_the_commit_that_is_written_down(config, monkeypatch):
    """Whatever its name means when the preparation reads it again."""
    read = []
    monkeypatch.setattr(sources, "TEXT_SOURCES", Registry("text source"))
    monkeypatch.setattr(prepared, "revision_of", lambda config: "a commit")

    @text_source(keys=("text_field",))
    def commits(config):
        read.append(config.revision)
        return [f"text {i} " * 20 for i in range(120)]

    directory = prepare(replace(config, source="commits", revision="main"), BPE)
    assert Manifest.load(directory).revision == "a commit"
    assert {*read} == {"a commit"}


@pytest.mark.parametrize("change", [{"request": {}}, {"revision": "b"}, {"tokens": {"train": 3}}])
def test_a_text_has_another_fingerprint_with_anything_that_changes_its_tokens(change):
    manifest = Manifest({"format": 4}, "a", 0, "<u2", (0, 0))
    assert replace(manifest, is_complete=True).fingerprint == manifest.fingerprint
    assert replace(manifest, **change).fingerprint != manifest.fingerprint


def test_special_tokens_in_text_are_text_and_many_words_make_ids_of_four_bytes(config, tmp_path):
    words = {END_OF_TEXT: 0, "a": 1, "b": 70_000}  # a vocabulary with holes
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": f"{i} {END_OF_TEXT}"}) + "\n" for i in range(30)]
    (tmp_path / "texts" / "0.jsonl").write_text("".join(lines))
    path = TokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    directory = prepare(config, path)
    manifest = Manifest.load(directory)
    assert manifest.dtype == "<u4"
    ids = [np.fromfile(directory / f"{split}.bin", "<u4") for split in prepared.SPLITS]
    assert (np.concatenate(ids) == manifest.end_of_text).sum() == manifest.read == 110


def test_a_long_document_is_tokenized_in_parts_that_are_the_whole():
    text = " ".join(f"word{i}" for i in range(1000)) + "x" * 5000
    parts = [*cut([text, "a text"], 700)]
    assert parts.pop() == "a text"
    assert "".join(parts) == text
    assert max(map(len, parts)) == 700
    assert all(part.startswith(" ") for part in parts[1:9])


KEYS = {
    "files": {"text_field": "t", "allow_patterns": ["*"], "revision": "r", "validation": 0.2},
    "hub": {"hub_name": "b/c", "hub_config": "c", "hub_split": "s", "text_field": "t"},
    "stdlib_docs": {"test": 0.3},
}
OTHERS = BPE, TokenizerConfig(), *(TokenizerConfig(path=f"some/{name}") for name in "ab")


@pytest.mark.parametrize("source", KEYS)
def test_a_text_is_another_with_any_key_of_its_source(config, source, monkeypatch):
    config = replace(config, source=source, hub_name="a/b")
    asked = [request_of(replace(config, **{k: v}), BPE) for k, v in KEYS[source].items()]
    asked += [request_of(config, tokenizer) for tokenizer in OTHERS]
    monkeypatch.setattr(prepared, "WORDS", ["another"])
    asked.append(request_of(config, BPE))
    assert len({json.dumps(request) for request in asked}) == len(KEYS[source]) + len(OTHERS) + 1


def test_a_changed_source_is_another_text_and_the_old_one_is_found_by_its_fingerprint(
    config, tmp_path
):
    before = prepare(config, BPE)
    write_texts(tmp_path / "texts", documents=41)
    after = directory_of(config, BPE)
    assert after != before
    fingerprint = open_prepared(before).fingerprint
    assert directory_of(config, BPE, wanted=fingerprint) == before
    assert directory_of(config, BPE, wanted="../evil") == after
    assert prepare_corpus(config, BPE, wanted=[fingerprint]).parts[0].directory == before
    assert prepare_corpus(config, BPE, wanted=[fingerprint] * 2).parts[0].directory == after
    assert open_prepared(prepare(config, BPE)).fingerprint != fingerprint


@pytest.mark.parametrize(
    "damage", [b"{", b"[]", b"{}", b'{"request": {}}', b'{"request": {"format": 3}}', b"\xff", None]
)
def test_a_damaged_manifest_of_another_text_stops_nothing(config, tmp_path, damage):
    before = prepare(config, BPE)
    fingerprint = open_prepared(before).fingerprint
    other = before.with_name("a-text-of-somebody-else")
    manifest = other / "manifest.json"
    if damage is None:
        manifest.mkdir(parents=True)
    else:
        other.mkdir()
        manifest.write_bytes(damage)
    write_texts(tmp_path / "texts", documents=41)
    assert directory_of(config, BPE, wanted=fingerprint) == before
    assert prepare(config, BPE) == directory_of(config, BPE, wanted="not there")
    if damage is not None:
        with pytest.raises(UserError, match="a-text-of-somebody-else"):
            open_prepared(other)


def test_any_changed_byte_of_a_manifest_is_found(config):
    directory = prepare(config, BPE)
    path = directory / "manifest.json"
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"manifest\.json: expected the manifest"):
            Manifest.load(directory)
    path.write_bytes(content)
    assert is_prepared(directory)


@pytest.mark.parametrize(
    ("key", "value"), [("tokens", 5), ("dtype", "<f4"), ("end_of_text", "x"), ("bounds", [1])]
)
def test_a_wrong_value_in_a_manifest_without_checksum_is_named(config, key, value):
    directory = prepare(config, BPE)
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    assert open_prepared(directory).fingerprint
    path.write_text(json.dumps(manifest | {key: value}))
    with pytest.raises(UserError, match=r"manifest\.json: expected the manifest"):
        open_prepared(directory)


def test_text_of_another_size_than_its_manifest_says_is_refused(config):
    directory = prepare(config, BPE)
    with (directory / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"train\.bin: expected \d+ tokens"):
        open_prepared(directory)


def test_a_hundred_billion_tokens_open_at_once_and_read_anywhere(tmp_path):
    count = 10**11
    for split in prepared.SPLITS:
        with (tmp_path / f"{split}.bin").open("wb") as file:  # sparse
            file.seek(2 * (count - 3))
            file.write(np.array([7, 8, 9], "<u2").tobytes())
    train_tokenizer([], 257, []).save(str(tmp_path / "tokenizer.json"))
    tokens = dict.fromkeys(prepared.SPLITS, count)
    request = {"format": prepared.FORMAT}
    Manifest(request, None, 0, "<u2", (0, 0), tokens=tokens, is_complete=True).save(tmp_path)
    text = open_prepared(tmp_path, "web", 2.0)
    pickled = pickle.dumps(text)
    assert len(pickled) < 1000
    for same in (text, pickle.loads(pickled)):
        assert (same.name, same.weight) == ("web", 2.0)
        windows = windows_at(same.train, np.array([10**10, count - 4]), 4)
        np.testing.assert_array_equal(windows, [[0, 0, 0, 0], [0, 7, 8, 9]])


def test_where_prepared_text_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNROPE_CACHE", raising=False)
    assert cache_directory(DataConfig()) == tmp_path / "unrope"
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path / "other"))
    assert cache_directory(DataConfig()) == tmp_path / "other"
    assert cache_directory(DataConfig(cache_dir="here")).name == "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(DataConfig(cache_dir="~/here")) == tmp_path / "here"
    monkeypatch.delenv("UNROPE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(DataConfig()) == tmp_path / ".cache" / "unrope"
