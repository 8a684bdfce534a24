"""The text of a run: its splits, its mixture, its blocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.data.conftest import write_texts
from trainer.common.errors import UserError
from trainer.config import DataConfig, RunConfig, TokenizerConfig
from trainer.data.corpus import corpus_at, prepare_corpus
from trainer.data.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    load_tokenizer,
    same_tokens,
    train_tokenizer,
)
from trainer.runs.parsing import parse

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


def test_a_mixture_has_the_texts_of_its_parts_and_one_tokenizer(config, tmp_path):
    write_texts(tmp_path / "more", files=1, documents=60, start=1000)
    both = replace(
        config,
        mixture={"a": {"weight": 3.0}, "b": {"weight": 1.0, "files": [str(tmp_path / "more")]}},
    )
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


def test_text_shorter_than_a_sequence_is_an_error(config):
    with pytest.raises(UserError, match="expected 100000 tokens or more in the train split"):
        prepare_corpus(replace(config, sequence_length=100_000), BPE)


def test_given_tokenizer_is_used_and_its_content_is_its_name(config, tmp_path):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    path = tmp_path / "tokenizer.json"
    corpus.tokenizer.save(str(path))
    other = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert other.tokenizer.to_str() == corpus.tokenizer.to_str()
    by_object = prepare_corpus(config, BPE, load_tokenizer(str(path)))
    assert by_object.directories == other.directories
    taken = replace(config, source="files", files=["gone"], prepared=str(corpus.directories[0]))
    assert prepare_corpus(taken, BPE).fingerprint == corpus.fingerprint
    with pytest.raises(UserError, match=r"data.prepared: .* has other tokens than the model"):
        prepare_corpus(taken, BPE, TextTokenizer(train_tokenizer(["other"], 260, [])))


def test_a_process_among_several_prepares_nothing_and_none_prepares_text_of_the_hub(config):
    with pytest.raises(UserError, match=r"texts is not prepared in .*python -m trainer prepare"):
        prepare_corpus(config, BPE, alone=False)
    prepare_corpus(config, BPE)
    assert prepare_corpus(config, BPE, alone=False).training_tokens
    with pytest.raises(UserError, match="data: some/text is not prepared"):
        prepare_corpus(replace(config, source="hub", hub_name="some/text"), BPE)


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
    before, after = (
        texts.parts[0].text.train.documents(texts.end_of_text, 10**9) for texts in (plain, other)
    )
    assert [ids[:-1].tolist() for ids in before] == [ids[:-1].tolist() for ids in after]
    assert {int(ids[-1]) for ids in before} == {0}
    assert {int(ids[-1]) for ids in after} == {other.end_of_text}


def test_a_tokenizer_without_an_end_of_text_token_is_refused(config, tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"<s>": 0, "a": 1}, unk_token="a")).save(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.path: expected an end-of-text token"):
        prepare_corpus(config, TokenizerConfig(path=str(path)))


def test_a_mixture_is_texts_by_name_with_weights_and_sources_of_their_own():
    here = {"source": "files", "files": ["a.txt"]}
    mixture = {"a": here, "b": here | {"files": ["b.txt"], "weight": 3}}
    mixed = DataConfig(sequence_length=128, text_field="body", mixture=mixture)
    first, second = mixed.texts.values()
    assert mixed.texts.keys() == {"a", "b"}
    assert (first[1], second[1]) == (1.0, 3.0)
    assert second[0] == replace(first[0], files=["b.txt"])
    assert (first[0].text_field, first[0].source, first[0].files) == ("body", "files", ["a.txt"])
    alone = DataConfig()
    assert alone.texts == {"text": (alone, 1.0)}


FILES = {"source": "files", "files": ["a.txt"]}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"restart_positions": True}, "data.restart_positions"),
        ({"prepared": "x", "mixture": {"a": FILES}}, "data.prepared"),
        ({"validation": 0.5, "test": 0.5}, "data.validation"),
        ({"mixture": {"a": FILES | {"weigth": 1.0}}}, "data.mixture.a"),
        ({"mixture": {"a": FILES, "b": FILES | {"weight": 1e-6}}}, "data.mixture.b.weight"),
        ({"sequence_length": 60, "needles": {"share": 0.1}}, "data.needles.mentions"),
    ],
)
def test_a_configuration_of_no_text_is_refused(data, key):
    with pytest.raises(UserError, match=key):
        parse(RunConfig, {"data": data})


CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("truncation", CUT, True),
        ("added_tokens", [], False),
        ("normalizer", {"type": "Lowercase"}, False),
        ("pre_tokenizer", {"type": "Whitespace"}, False),
    ],
)
def test_tokenizers_are_the_same_if_all_that_makes_ids_is(key, value, same):
    first = train_tokenizer(["a text of a few words"], 300, [" zebra"])
    second = Tokenizer.from_str(json.dumps({**json.loads(first.to_str()), key: value}))
    assert same_tokens(first, second) == same
