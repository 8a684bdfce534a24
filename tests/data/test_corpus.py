"""From documents to packed, memory-mapped tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import pack, prepare_corpus, split_documents
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError


@pytest.fixture
def config(tmp_path):
    files = []
    for i in range(40):
        path = tmp_path / f"{i}.txt"
        path.write_text(f"This is document number {i}. " * 20)
        files.append(str(path))
    return DataConfig(
        source="files",
        files=files,
        sequence_length=16,
        validation=0.1,
        test=0.2,
        cache_dir=str(tmp_path / "cache"),
    )


def test_streams_are_the_documents_with_an_end_after_each(config):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    stream = corpus.train.windows(np.array([0]), len(corpus.train))[0]
    parts = np.split(stream, np.flatnonzero(stream == corpus.end_of_text) + 1)
    texts = [corpus.tokenizer.decode(part.tolist()) for part in parts]
    whole = [text for text in texts[:-1] if text]
    assert len(whole) > 20
    assert all(text.startswith("This is document number") for text in whole)


def test_no_document_is_in_two_splits(config):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    seen: dict[str, set[str]] = {}
    for name in ("train", "validation", "test"):
        stream = getattr(corpus, name)
        text = corpus.tokenizer.decode(stream.windows(np.array([0]), len(stream))[0].tolist())
        seen[name] = {word for word in text.replace(".", " ").split() if word.isdigit()}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_split_shares_are_of_characters():
    documents = ["x" * n for n in (50, 10, 10, 10, 10, 10)]
    splits = split_documents(documents, 0.1, 0.2)
    assert [len(s) for s in splits.values()] == [3, 1, 2]


def test_second_preparation_opens_the_first_and_other_text_does_not(config, tmp_path):
    first = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    again = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    assert again.fingerprint == first.fingerprint
    (tmp_path / "0.txt").write_text("Something else entirely. " * 30)
    assert prepare_corpus(config, TokenizerConfig(vocab_size=300)).fingerprint != first.fingerprint
    assert not list((tmp_path / "cache").rglob(".partial-*"))


def test_windows_cross_blocks(config):
    stream = prepare_corpus(config, TokenizerConfig(vocab_size=300)).train
    whole = stream.windows(np.array([0]), len(stream))[0]
    np.testing.assert_array_equal(
        stream.windows(np.array([5, 30]), 40), [whole[5:45], whole[30:70]]
    )


def test_text_too_short_leaves_nothing_behind(config, tmp_path):
    from dataclasses import replace

    with pytest.raises(UserError, match="fewer tokens than one sequence"):
        prepare_corpus(replace(config, sequence_length=100_000), TokenizerConfig(vocab_size=300))
    assert not any((tmp_path / "cache" / "corpora").iterdir())


def test_given_tokenizer_is_used(config, tmp_path):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    corpus.tokenizer.save(str(tmp_path / "tokenizer.json"))
    other = prepare_corpus(config, TokenizerConfig(path=str(tmp_path / "tokenizer.json")))
    assert other.tokenizer.to_str() == corpus.tokenizer.to_str()


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_bad_tokenizer_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.path"):
        load_tokenizer(str(path))


def test_pack_leaves_out_only_the_incomplete_block():
    blocks = pack([[1, 2, 3], [4], [5, 6, 7, 8]], end=0, length=4)
    assert blocks.tolist() == [[1, 2, 3, 0], [4, 0, 5, 6]]


def test_a_new_version_of_the_program_finds_text_that_an_older_one_prepared(config, monkeypatch):
    """The fingerprint is that of version 0.1.0, whatever the version."""
    monkeypatch.setattr("trainer.__version__", "9.9.9")
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=300))
    assert corpus.fingerprint == "3fe463badbe4f6be"


@pytest.fixture
def prepared(config):
    """The directory of prepared text, and a function that opens it again."""

    def again():
        return prepare_corpus(config, TokenizerConfig(vocab_size=300))

    return Path(config.cache_dir) / "corpora" / again().fingerprint, again


def test_prepared_text_without_a_number_has_the_first_format(prepared):
    directory, again = prepared
    assert json.loads((directory / "format.json").read_text()) == {"format": 1}
    (directory / "format.json").unlink()
    assert len(again().train)


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"format": 2}', "format 2.*reads up to 1; install a newer one, or remove it"),
     ("{}", "damaged"), ("[", "damaged"), ('{"format": "1"}', "damaged")],
)  # fmt: skip
def test_prepared_text_of_another_format_is_refused_in_one_line(prepared, content, said):
    directory, again = prepared
    (directory / "format.json").write_text(content)
    with pytest.raises(UserError, match=said) as error:
        again()
    (problem,) = error.value.problems
    assert problem.startswith("data.cache_dir: the prepared text in")
    assert "\n" not in problem
