"""The text of a run: its splits, its mixture, its blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.data.conftest import write_texts
from trainer.common.errors import UserError
from trainer.data import plan, preparing, sources
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import corpus_at, prepare_corpus
from trainer.data.encoding import document_hash
from trainer.data.plan import exact_thresholds, request_of
from trainer.data.preparing import unprepared
from trainer.data.tokenizer import END_OF_TEXT, load_tokenizer

BPE = TokenizerConfig(vocab_size=300)


def texts_of(corpus, split):
    return corpus.documents(split, 10**9)


def test_no_document_is_in_two_splits_not_even_twice(config, tmp_path):
    path = tmp_path / "texts" / "9.jsonl"
    path.write_text((tmp_path / "texts" / "0.jsonl").read_text())  # all of it once more
    corpus = prepare_corpus(config, BPE)
    splits = [set(texts_of(corpus, split)) for split in ("train", "validation", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 120


def test_small_text_is_split_by_share_of_its_characters(config):
    corpus = prepare_corpus(config, BPE)
    sizes = [sum(map(len, texts_of(corpus, split))) for split in ("train", "validation", "test")]
    # A split ends with a document, of 216 characters at the most.
    whole = sum(sizes)
    for size, share in zip(sizes, (0.7, 0.1, 0.2), strict=True):
        assert abs(size - share * whole) <= 216


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
    result = exact_thresholds(documents, DataConfig(validation=validation, test=test))
    total, before, splits = sum(map(len, documents)), 0, [0]
    for rank, text in enumerate(sorted(documents, key=document_hash), start=1 - len(documents)):
        share = sum(before >= total * (1 - held_out) for held_out in (validation + test, test))
        needed = 2 + rank  # so that the others can hold a document of each later split
        splits.append(min(max(share, needed), splits[-1] + 1) if before else 0)
        before += len(text)
    chosen = [("train", "validation", "test")[split] for split in splits[1:]]
    assert [result.split_of(text) for text in sorted(documents, key=document_hash)] == chosen
    assert set(chosen) == {"train", "validation", "test"}


def test_large_text_holds_out_a_number_of_tokens(config, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "SMALL", 0)
    write_texts(tmp_path / "texts", files=3, documents=3000)
    config = replace(config, validation_tokens=4_000, test_tokens=8_000)
    corpus = prepare_corpus(config, BPE)
    characters = [sum(map(len, texts_of(corpus, split))) / 4 for split in ("validation", "test")]
    np.testing.assert_allclose(characters, [4_000, 8_000], rtol=0.4)


def test_windows_cross_shards_and_any_length_reads_the_same_text(config, monkeypatch):
    monkeypatch.setattr(plan, "UNIT", 1)
    corpus = prepare_corpus(config, BPE)
    stream = corpus.train
    assert len(stream.places) == 3
    files = [place.directory / f"{place.shard.name}.bin" for place in stream.places]
    parts = [np.fromfile(path, "<u2") for path in files]
    whole, edge = np.concatenate(parts), len(parts[0])
    starts = np.array([0, 5, edge - 40, edge - 39, edge - 1, edge, len(whole) - 40])
    expected = [whole[start : start + 40] for start in starts]
    np.testing.assert_array_equal(stream.windows(starts, 40), expected)
    over_two = len(parts[1]) + 20  # windows that begin in the first shard and end in the third
    expected = whole[edge - 10 : edge - 10 + over_two]
    np.testing.assert_array_equal(stream.windows(np.array([edge - 10]), over_two)[0], expected)
    other = prepare_corpus(replace(config, sequence_length=40), BPE)
    assert other.directories == corpus.directories


def test_a_mixture_has_the_texts_of_its_parts_and_one_tokenizer(config, tmp_path):
    write_texts(tmp_path / "more", files=1, documents=60, start=1000)
    both = replace(
        config,
        mixture={"a": {"weight": 3.0}, "b": {"weight": 1.0, "files": [str(tmp_path / "more")]}},
    )
    assert both.problems() == []
    corpus = prepare_corpus(both, BPE)
    alone = prepare_corpus(config, BPE)
    assert [part.name for part in corpus.parts] == ["a", "b"]
    assert corpus.parts[0].text.fingerprint == alone.fingerprint
    assert corpus.fingerprint != alone.fingerprint
    assert len(corpus.test) == sum(len(part.text.test) for part in corpus.parts)
    texts = texts_of(corpus, "train")
    assert any("Document 1001" in text for text in texts)
    again = corpus_at(both, corpus.directories)
    assert again.fingerprint == corpus.fingerprint


def test_plain_text_is_held_out_by_pieces_or_by_files(tmp_path):
    for number in range(6):
        lines = (f"File {number} line {i}.\n" for i in range(2000))
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    cut = DataConfig(source="files", files=[str(tmp_path)], cache_dir=str(tmp_path / "cache"))
    whole = replace(cut, piece_characters=None, validation=0.2, test=0.2)

    def files_of(config):
        corpus = prepare_corpus(config, BPE)
        splits = [" ".join(texts_of(corpus, split)) for split in ("train", "validation", "test")]
        return [{i for i in range(6) if f"File {i} " in text} for text in splits], corpus

    splits, corpus = files_of(cut)
    assert splits[0] & splits[2]
    assert corpus.parts[0].text.piece_characters == 8192
    splits, corpus = files_of(whole)
    assert sum(map(len, splits)) == len(set.union(*splits)) == 6
    assert corpus.parts[0].text.piece_characters is None


def test_too_few_files_that_are_one_document_each_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("A long text. " * 9000)
    config = DataConfig(source="files", files=[str(tmp_path)], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"plain text is one document \(data\.piece_characters"):
        prepare_corpus(replace(config, piece_characters=None), BPE)
    with pytest.raises(UserError, match=r"is cut into documents of 100,000 characters \(data\.pi"):
        prepare_corpus(replace(config, piece_characters=100_000), BPE)


def test_a_source_of_a_plugin_that_changes_is_prepared_anew(tmp_path, monkeypatch):
    def before():
        return (f"Document {i} says {i * i}. " for i in range(200))

    def after():
        return (f"Document {i} says {i * i * i}. " for i in range(200))

    config = DataConfig(source="mine", sequence_length=16, cache_dir=str(tmp_path))
    monkeypatch.setitem(sources.TEXT_SOURCES, "mine", before)
    old = prepare_corpus(config, BPE)
    assert prepare_corpus(config, BPE).directories == old.directories
    monkeypatch.setitem(sources.TEXT_SOURCES, "mine", after)
    new = prepare_corpus(config, BPE)
    assert texts_of(new, "train") != texts_of(old, "train")
    monkeypatch.setitem(sources.TEXT_SOURCES, "mine", lambda: ["one", "two", "three"])
    with pytest.raises(UserError, match="mine has other code than when it was prepared, or none"):
        prepare_corpus(config, BPE, alone=False)
    resumed = prepare_corpus(config, BPE, wanted=old.fingerprints)
    assert resumed.directories == old.directories != new.directories


def test_text_that_is_not_small_is_prepared_by_a_command_of_its_own(config, monkeypatch):
    monkeypatch.setattr(preparing, "LARGEST_BY_ITSELF", 10)
    with pytest.raises(UserError, match=r"has not been prepared .* python -m trainer prepare"):
        prepare_corpus(config, BPE)


def test_a_process_among_several_prepares_nothing(config):
    with pytest.raises(UserError, match=r"has not been prepared .* python -m trainer prepare"):
        prepare_corpus(config, BPE, alone=False)
    prepare_corpus(config, BPE)
    assert prepare_corpus(config, BPE, alone=False).train


def test_text_behind_a_network_says_what_it_is_without_one(tmp_path):
    plain = {"source": "hub", "hub_name": "some/text", "about": "much", "cache_dir": str(tmp_path)}
    (problem,) = map(str, unprepared(plain))
    assert problem.startswith("data: some/text, much has not been prepared")
    assert unprepared({"source": "stdlib_docs"}) == []


def test_of_text_behind_a_network_all_but_the_tokenizer_says_whether_it_is_prepared(
    tmp_path, monkeypatch
):
    plain = {"source": "hub", "hub_name": "some/text", "cache_dir": str(tmp_path)}
    request = request_of(DataConfig(**plain), TokenizerConfig(vocab_size=999), None)
    monkeypatch.setattr(preparing, "read_manifest", lambda _: SimpleNamespace(request=request))
    (tmp_path / "corpora" / "text").mkdir(parents=True)
    (tmp_path / "corpora" / "text" / "manifest.json").touch()
    assert unprepared(plain) == []
    for key in ("hub_name", "hub_config", "hub_split", "text_field", "revision"):
        assert len(unprepared(plain | {key: "other"})) == 1


def test_text_shorter_than_a_sequence_is_an_error(config):
    with pytest.raises(UserError, match="fewer tokens than one sequence of 100000"):
        prepare_corpus(replace(config, sequence_length=100_000), BPE)


def test_given_tokenizer_is_used_and_its_content_is_its_name(config, tmp_path):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    path = tmp_path / "tokenizer.json"
    corpus.tokenizer.save(str(path))
    other = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert other.tokenizer.to_str() == corpus.tokenizer.to_str()
    by_object = prepare_corpus(config, BPE, load_tokenizer(str(path)))
    assert by_object.directories == other.directories


def test_text_is_prepared_anew_if_published_settings_name_another_end(config, tmp_path):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    tokenizer = corpus.tokenizer
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    plain = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert plain.end_of_text == 0
    published = tmp_path / "tokenizer_config.json"
    published.write_text(json.dumps({"eos_token": END_OF_TEXT}))
    same = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert same.directories == plain.directories
    published.write_text(json.dumps({"eos_token": "<eos>"}))
    other = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert other.directories != plain.directories
    assert other.end_of_text == other.first_token == tokenizer.token_to_id("<eos>")
    before, after = (texts.train.documents(10**9) for texts in (plain, other))
    assert [ids[:-1].tolist() for ids in before] == [ids[:-1].tolist() for ids in after]
    assert {int(ids[-1]) for ids in before} == {0}
    assert {int(ids[-1]) for ids in after} == {other.end_of_text}


def test_many_words_make_ids_of_four_bytes(config, tmp_path):
    words = {word: i for i, word in enumerate([END_OF_TEXT, *map(str, range(70_000))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END_OF_TEXT))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare_corpus(config, TokenizerConfig(path=str(tmp_path / "tokenizer.json")))
    assert corpus.train.places[0].ids.dtype == "<u4"


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_bad_tokenizer_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.path"):
        load_tokenizer(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.path: there is no file 'x"):
        load_tokenizer("x" * 300 + ".json")


def test_a_tokenizer_without_an_end_of_text_token_is_refused(config, tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"<s>": 0, "a": 1}, unk_token="a")).save(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.path: the tokenizer has no end-of-text token"):
        prepare_corpus(config, TokenizerConfig(path=str(path)))


def test_a_tokenizer_of_the_hub_without_a_network(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match="there is no file 'no/such', and no such model"):
        load_tokenizer("no/such")
