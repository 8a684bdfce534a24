"""What a tokenizer is trained on, and that equal requests alone have one name."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace

import pytest

from trainer.data import plan
from trainer.data.config import SourceConfig, TokenizerConfig
from trainer.data.plan import _sample, digest, make_plan, request_of
from trainer.data.sources import list_source

MEGABYTE = TokenizerConfig(sample_megabytes=1)


def source(place, files, documents, characters):
    """Files with so many documents, each as long as that, which say where they are from."""
    for file in range(files):
        texts = (f"{file:02}-{i:02} ".ljust(characters, "x") for i in range(documents))
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (place / f"{file:02}.jsonl").write_text("".join(lines))
    return SourceConfig(source="files", files=[str(place / "*.jsonl")])


def sampled(config, tokenizer=MEGABYTE):
    """How many documents of each file are sampled, and whether they are its first."""
    result = [text[:5].split("-") for text in _sample(config, list_source(config), tokenizer)]
    counts = Counter(file for file, _ in result)
    for name, count in counts.items():
        assert [int(number) for file, number in result if file == name] == [*range(count)]
    return dict(counts)


def test_every_file_gives_as_much_to_the_tokenizer(tmp_path):
    """A third of a megabyte of each, in documents of 100,000: the fourth is the first beyond it."""
    config = source(tmp_path, files=3, documents=6, characters=100_000)
    assert sampled(config) == {"00": 4, "01": 4, "02": 4}
    assert sampled(config, TokenizerConfig(sample_megabytes=2)) == dict.fromkeys(
        ("00", "01", "02"), 6
    )


def test_of_many_files_some_are_sampled_from_the_first_to_the_last_part(tmp_path):
    config = source(tmp_path, files=40, documents=2, characters=10)
    result = sampled(config)
    assert len(result) == 16
    assert set(result.values()) == {2}
    assert [int(name) for name in result] == [i * 40 // 16 for i in range(16)]


def test_a_tokenizer_of_large_text_sees_no_held_out_document(tmp_path, monkeypatch):
    seen = []

    def train(texts, *_):
        seen.extend(texts)
        raise KeyboardInterrupt

    config = replace(source(tmp_path, 3, 40, 1000), validation=0.2, test=0.2)
    monkeypatch.setattr(plan, "SMALL", 1000)
    monkeypatch.setattr(plan, "train_tokenizer", train)
    with pytest.raises(KeyboardInterrupt):
        make_plan(config, MEGABYTE, None, list_source(config))
    thresholds = plan._estimated_thresholds(config, 3 * 40 * 1000 // 4)
    everything = list(_sample(config, list_source(config), MEGABYTE))
    assert len(everything) == 120
    assert seen == [text for text in everything if thresholds.split_of(text) == "train"]
    assert 0 < len(seen) < 110


OTHERS = {
    "source": "hub", "files": ["b"], "allow_patterns": ["*"], "hub_name": "b", "hub_config": "b",
    "hub_split": "test", "hub_files": ["b"], "revision": "b", "text_field": "b",
    "min_characters": 2, "bad_rows": 0.5, "validation": 0.1, "test": 0.1, "validation_tokens": 5,
    "test_tokens": 5, "arguments": {"b": 1}, "about": "b", "piece_characters": None,
}  # fmt: skip
COMMON = {
    "source", "revision", "min_characters", "validation", "test", "validation_tokens",
    "test_tokens",
}  # fmt: skip
OWN = {
    "hub": {"hub_name", "hub_config", "hub_split", "hub_files", "text_field", "piece_characters"},
    "files": {"files", "allow_patterns", "text_field", "piece_characters"},
    "stdlib_docs": set(),
    "of_a_plugin": {"arguments"},
}


@pytest.mark.parametrize("kind", OWN)
def test_a_request_changes_with_every_key_of_its_source(kind):
    """Of a source of another kind no key is read; how many rows may be malformed, and what a text
    is about, change no token."""
    assert {field.name for field in fields(SourceConfig)} == {*OTHERS}
    config = SourceConfig(source=kind)
    before = digest(request_of(config, MEGABYTE, None))
    others = OTHERS | {"source": "files" if kind == "hub" else "hub"}
    changed = {
        key
        for key, value in others.items()
        if digest(request_of(replace(config, **{key: value}), MEGABYTE, None)) != before
    }
    assert changed == COMMON | OWN[kind]


def test_names_of_text_prepared_before_a_key_existed_stay_valid():
    requests = (
        request_of(SourceConfig(source="files", files=["a.txt"]), MEGABYTE, None),
        request_of(SourceConfig(source="hub", hub_name="a"), MEGABYTE, None),
    )
    for request in requests:
        assert not {"piece_characters", "allow_patterns"} & {*request}


def test_a_request_changes_with_the_tokenizer_that_is_trained():
    config = SourceConfig()
    others = {"vocab_size": 300, "sample_megabytes": 2, "path": "some/model"}
    assert {field.name for field in fields(TokenizerConfig)} == {*others}
    result = [
        digest(request_of(config, tokenizer, None))
        for tokenizer in (MEGABYTE, *(replace(MEGABYTE, **{k: v}) for k, v in others.items()))
    ]
    assert len(set(result)) == 4
