"""The text of a run: its splits, its mixture, and windows of its held-out text."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from tests.data.conftest import held_out, write_texts
from trainer.common.errors import UserError
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import (
    Corpus,
    HeldOutText,
    corpus_at,
    divided,
    held_out_windows,
    prepare_corpus,
)
from trainer.data.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    same_tokens,
    special_tokens,
    train_tokenizer,
)
from trainer.interchange.published import read_token_files

BPE = TokenizerConfig(vocab_size=300)


def texts_of(corpus, split):
    parts = tuple((part.weight, getattr(part, split)) for part in corpus.parts)
    return corpus.documents(HeldOutText(parts), 10**9)


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


def test_a_mixture_has_the_texts_and_weights_of_its_parts_and_one_tokenizer(config, tmp_path):
    """The held-out part of the first text is a quarter of the second's, and its weight 3 of 4."""
    write_texts(tmp_path / "more", files=4, documents=120, start=1000)
    both = replace(
        config,
        mixture={"a": {"weight": 3.0}, "b": {"weight": 1.0, "files": [str(tmp_path / "more")]}},
    )
    corpus, alone = prepare_corpus(both, BPE), prepare_corpus(config, BPE)
    assert [part.name for part in corpus.parts] == ["a", "b"]
    assert corpus.parts[0].fingerprint == alone.fingerprint
    assert corpus.fingerprint != alone.fingerprint
    assert (
        corpus_at(both, [part.directory for part in corpus.parts]).fingerprint == corpus.fingerprint
    )
    assert any("Document 1001" in text for text in texts_of(corpus, "train"))
    for text, first in ((corpus.validation, alone.validation), (corpus.test, alone.test)):
        assert len(text) == sum(len(ids) for _, ids in text.parts)
        windows = {tuple(window) for window in held_out_windows(text, 40, 16).tolist()}
        assert windows > {tuple(window) for window in held_out_windows(first, 30, 16).tolist()}
    numbers = [int(text.split()[1]) for text in corpus.documents(corpus.test, 600)]
    assert {number >= 1000 for number in numbers} == {True, False}  # for haystacks of both


def test_a_mixture_is_another_with_other_texts_or_weights():
    def key(**weights):
        parts = (SimpleNamespace(fingerprint=x, weight=weight) for x, weight in weights.items())
        return Corpus(tuple(parts)).fingerprint

    mixtures = ({"a": 1}, {"a": 1, "b": 1}, {"a": 3, "b": 1}, {"b": 1, "a": 1}, {"a": 1, "c": 1})
    assert len({key(**weights) for weights in mixtures}) == len(mixtures)
    assert key(a=1) == key(a=3) == "a"  # a weight of one text mixes nothing


def test_a_phase_mixes_some_of_the_texts_with_weights_of_its_own(config, tmp_path):
    write_texts(tmp_path / "more", start=1000)
    more = {"files": [str(tmp_path / "more")]}
    corpus = prepare_corpus(replace(config, mixture={"a": {}, "b": more, "c": more}), BPE)
    mixed = corpus.mixed(replace(config, mixture={"c": {"weight": 3.0} | more, "a": {}}))
    assert [(part.name, part.weight) for part in mixed.parts] == [("a", 1.0), ("c", 3.0)]


def test_a_probe_is_held_out_windows_behind_the_first_token(config):
    corpus = prepare_corpus(config, BPE)
    probe = corpus.probe(3, 16)
    windows = held_out_windows(corpus.validation, 3, 16)
    assert probe[:, 0].tolist() == [corpus.first_token] * 3
    np.testing.assert_array_equal(probe[:, 1:], windows)


def test_text_shorter_than_a_sequence_is_an_error(config):
    with pytest.raises(UserError, match="expected 100000 tokens or more in the train split"):
        prepare_corpus(replace(config, sequence_length=100_000), BPE)


def test_given_tokenizer_is_used_and_its_content_is_its_name(config, tmp_path, monkeypatch):
    corpus = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    path = tmp_path / "tokenizer.json"
    corpus.tokenizer.save(str(path))
    other = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert other.tokenizer.to_str() == corpus.tokenizer.to_str()
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = prepare_corpus(config, TokenizerConfig(path="~/tokenizer.json"))
    assert at_home.parts[0].directory == other.parts[0].directory
    (tmp_path / "model").mkdir()
    corpus.tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert load_tokenizer("~/model").tokenizer.to_str() == corpus.tokenizer.to_str()
    by_object = prepare_corpus(config, load_tokenizer(str(path)))
    assert by_object.parts[0].directory == other.parts[0].directory
    taken = replace(config, source="files", files=["gone"], prepared=str(corpus.parts[0].directory))
    assert prepare_corpus(taken, BPE).fingerprint == corpus.fingerprint
    with pytest.raises(UserError, match=r"data: .* has other tokens than the model"):
        prepare_corpus(taken, special_tokens(train_tokenizer(["other"], 260, [])))
    train_tokenizer(["other"], 260, []).save(str(path))
    with pytest.raises(UserError, match=r"data: .* has other tokens than the model"):
        prepare_corpus(taken, TokenizerConfig(path=str(path)))


def test_a_process_among_several_prepares_nothing_and_none_prepares_text_of_the_hub(config):
    with pytest.raises(UserError, match=r"texts is not prepared in .*python -m trainer prepare"):
        prepare_corpus(config, BPE, alone=False)
    prepare_corpus(config, BPE)
    assert prepare_corpus(config, BPE, alone=False).parts
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
    assert same.parts[0].directory == plain.parts[0].directory
    published.write_text(json.dumps({"eos_token": "<eos>"}))
    other = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert other.parts[0].directory != plain.parts[0].directory
    assert other.end_of_text == other.first_token == tokenizer.token_to_id("<eos>")
    before, after = (texts.parts[0].train for texts in (plain, other))
    assert (before == 0).any()
    np.testing.assert_array_equal(after, np.where(before == 0, other.end_of_text, before))


def test_settings_on_the_hub_count_as_those_in_a_directory(config, tmp_path, monkeypatch):
    tokenizer = prepare_corpus(config, TokenizerConfig(vocab_size=280)).tokenizer
    tokenizer.add_special_tokens(["<eos>"])
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    tokenizer.save(str(snapshot / "tokenizer.json"))
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))

    def snapshot_download(name, allow_patterns):
        assert name == "owner/model"
        for file in snapshot.iterdir():
            if file.name not in allow_patterns:
                file.unlink()
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_tokenizer("owner/model").end == tokenizer.token_to_id("<eos>")


@pytest.mark.parametrize("path", ["gpt2", "gone/a/tokenizer.json", "gone/my.json", "."])
def test_a_path_without_a_tokenizer_is_named_with_its_key(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^tokenizer\.path: .*{path!r}"):
        load_tokenizer(path)


def test_settings_beside_a_tokenizer_of_another_name_are_of_another(tmp_path):
    tokenizer = train_tokenizer(["a text"], 270, [])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    for name, end in (("tokenizer.json", tokenizer.token_to_id("a")), ("mine.json", 0)):
        tokenizer.save(str(tmp_path / name))
        assert load_tokenizer(str(tmp_path / name)).end == end


def test_a_tokenizer_that_appends_its_end_puts_it_between_documents_only(config, tmp_path):
    plain = prepare_corpus(config, TokenizerConfig(vocab_size=280))
    tokenizer = Tokenizer.from_str(plain.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, plain.end_of_text)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    corpus = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert load_tokenizer(str(path)).first is None
    assert corpus.first_token == corpus.end_of_text == plain.end_of_text
    for split in ("train", "validation", "test"):
        ids, others = (getattr(text.parts[0], split) for text in (corpus, plain))
        np.testing.assert_array_equal(ids, others)


def test_a_tokenizer_without_an_end_of_text_token_is_refused(config, tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"<s>": 0, "a": 1}, unk_token="a")).save(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.path: expected an end-of-text token"):
        prepare_corpus(config, TokenizerConfig(path=str(path)))


WORDS = ["a", "</s>", "<eos>", "<end_of_turn>", "<s>", "b"]


@pytest.mark.parametrize(
    ("config", "generation", "of_tokenizer", "end", "stops"),
    [
        ({}, {}, {}, 1, {1, 3}),  # by names
        ({"eos_token_id": 2}, {}, {}, 2, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 5]}, {}, 2, {2, 3, 5}),
        ({"eos_token_id": 3}, {}, {}, 1, {1, 3}),  # a turn's end separates no documents
        ({"eos_token_id": 5}, {}, {}, 5, {5}),
        ({"eos_token_id": [99, -1, None]}, {}, {"eos_token": {"content": "<eos>"}}, 2, {2, 3}),
        ({}, {}, {"eos_token": "b"}, 5, {3, 5}),
    ],
)
def test_special_tokens_are_those_of_published_settings_or_else_of_their_names(
    tmp_path, config, generation, of_tokenizer, end, stops
):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    for name, values in zip(names, (config, generation, of_tokenizer), strict=True):
        (tmp_path / name).write_text(json.dumps(values))
    tokens = special_tokens(tokenizer, read_token_files(tmp_path))
    assert (tokens.end, tokens.stops) == (end, stops)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bos_token_id": 4}, 4),
        ({"bos_token_id": 0}, 0),
        ({"text_config": {"bos_token_id": 4}}, 4),
        ({"text_config": {"bos_token_id": 4}, "bos_token_id": 5}, 5),  # as in transformers
        *(({"bos_token_id": odd}, None) for odd in (9, -1, None)),
        ({}, None),
    ],
)
def test_the_first_token_is_the_tokenizers_own_or_that_of_training(tmp_path, config, named):
    """A published configuration names one, which the tokenizer may not add."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = read_token_files(tmp_path)
    published, trained = special_tokens(tokenizer, files), special_tokens(tokenizer, files, 5)
    assert (published.first, published.named_bos, published.end) == (None, named, 1)
    assert (trained.first, trained.named_bos, trained.end) == (5, named, 5)
    for template, first in (("<s> $0", 4), ("<s> $0 </s>", 4), ("$0 </s>", None), ("$0", None)):
        tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("<s>", 4), ("</s>", 1)]
        )
        assert special_tokens(tokenizer, files).first == first
        assert special_tokens(tokenizer, files, 5).first == (5 if first is None else first)


def test_a_mixture_is_texts_by_name_with_weights_and_sources_of_their_own():
    here = {"source": "files", "files": ["a.txt"]}
    mixture = {"a": here, "b": here | {"files": ["b.txt"], "weight": 3}}
    mixed = DataConfig(sequence_length=128, text_field="body", mixture=mixture)
    first, second = mixed.texts.values()
    assert mixed.texts.keys() == {"a", "b"}
    assert (first.weight, second.weight) == (1.0, 3.0)
    assert second == replace(first, files=["b.txt"], weight=3)
    assert (first.text_field, first.source, first.files) == ("body", "files", ["a.txt"])
    alone = DataConfig()
    assert alone.texts == {"text": alone}


CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
FILLED = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
FILLED |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
OF_BYTES = ("add_prefix_space", "trim_offsets", "use_regex")


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("truncation", CUT, True),
        ("padding", FILLED, True),
        ("post_processor", {"type": "ByteLevel"} | dict.fromkeys(OF_BYTES, True), True),
        ("added_tokens", [], False),
        ("normalizer", {"type": "Lowercase"}, False),
        ("pre_tokenizer", {"type": "Whitespace"}, False),
    ],
)
def test_tokenizers_are_the_same_if_all_that_makes_ids_is(key, value, same):
    first = train_tokenizer(["a text of a few words"], 300, [" zebra"])
    second = Tokenizer.from_str(json.dumps({**json.loads(first.to_str()), key: value}))
    assert same_tokens(first, second) == same


# ------------------------------------------------- held-out windows


def mixed(*sizes, weights):
    """Texts whose tokens are 1000 and up, 2000 and up, ..."""
    ids = (np.arange(size) + 1000 * (1 + part) for part, size in enumerate(sizes))
    return held_out(*ids, weights=weights)


def parts_of(windows):
    """How many windows each text has; every window lies within one."""
    texts = windows // 1000 - 1
    assert (texts == texts[:, :1]).all()
    return Counter(texts[:, 0].tolist())


def test_windows_of_a_mixture_come_from_its_texts_by_weight_whatever_their_sizes():
    text = mixed(100, 900, weights=[0.75, 0.25])
    assert parts_of(held_out_windows(text, 64, 10)) == {0: 48, 1: 16}
    assert parts_of(held_out_windows(text, 64, 20)) == {0: 48, 1: 16}
    # Those of each text, as if it were alone, and spread among the others.
    windows = held_out_windows(text, 8, 10)
    of_parts = windows[:, 0] // 1000 - 1
    assert of_parts.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    for part, ids in enumerate((np.arange(100) + 1000, np.arange(900) + 2000)):
        mine = windows[of_parts == part]
        np.testing.assert_array_equal(mine, held_out_windows(held_out(ids), len(mine), 10))


def test_a_text_that_is_too_short_gives_what_it_has():
    text = mixed(30, 1000, 1000, weights=[0.5, 0.25, 0.25])
    windows = held_out_windows(text, 16, 20, 10)
    assert parts_of(windows) == {0: 3, 1: 7, 2: 6}
    assert parts_of(held_out_windows(text, 1, 31)) == {1: 1}
    assert len(held_out_windows(held_out(range(30)), 16, 20, 10)) == 3
    assert len(held_out_windows(held_out(range(30)), 16, 20, 31)) == 1
    assert parts_of(held_out_windows(text, 8, 31)) == {1: 4, 2: 4}


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 80)), min_size=1, max_size=6),
)
def test_shares_are_those_of_the_weights_as_far_as_there_is_text(count, items):
    weights, most = zip(*items, strict=True)
    shares = divided(count, weights, most)
    assert sum(shares) == min(count, sum(most))
    assert all(0 <= share <= limit for share, limit in zip(shares, most, strict=True))
    free = [i for i, share in enumerate(shares) if share < most[i]]
    for i in free:
        for j in range(len(shares)):  # nothing that is full has more than its weight gives it
            assert shares[j] / weights[j] <= (shares[i] + 1) / weights[i] + 1 / weights[j] + 1e-9


def test_without_limits_the_largest_remainders_are_rounded_up():
    assert divided(10, [0.26, 0.26, 0.48], [10, 10, 10]) == [3, 2, 5]
    assert divided(64, [0.02, 0.98], [64, 64]) == [1, 63]


def test_windows_end_at_the_same_places_whatever_their_length():
    """At i / n of the text; what is longer than the text before its end begins in its end."""
    text = held_out(range(100))
    for length in (1, 10, 25, 60, 100):
        windows = held_out_windows(text, 4, length)
        for row, last in zip(windows, (24, 49, 74, 99), strict=True):
            assert row.tolist() == [(last - length + 1 + i) % 100 for i in range(length)]
    assert held_out_windows(text, 9, 60, apart=30)[:, -1].tolist() == [32, 65, 99]
    with pytest.raises(UserError, match="expected 101 tokens"):
        held_out_windows(text, 1, 101)


def test_windows_of_a_mixture_end_in_each_of_its_texts():
    text = held_out(range(100), range(1000, 1040), weights=(3, 1))
    ends = held_out_windows(text, 8, 20)[:, -1]
    assert sorted(ends.tolist()) == [15, 32, 49, 65, 82, 99, 1019, 1039]
    assert (held_out_windows(text, 8, 50) < 1000).all()
