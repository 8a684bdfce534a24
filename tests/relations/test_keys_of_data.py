"""Keys of prepared text, and of the order in which it is read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest

from tests.relations.keys import (
    Key,
    ignored_leaves,
)
from trainer.data.config import DataConfig, SourceConfig, TokenizerConfig
from trainer.data.corpus import Corpus, Part
from trainer.data.files import File
from trainer.data.plan import directory_name, request_of
from trainer.data.prepared import Prepared
from trainer.data.sources import Listing
from trainer.runs.phases import NOT_OF_SAMPLES, reading
from trainer.runs.starting_point import data_fingerprints


@dataclass(frozen=True)
class Text:
    """What decides on prepared text."""

    source: SourceConfig
    tokenizer: TokenizerConfig


def request(text):
    return request_of(text.source, text.tokenizer, None)


PLACES = ("hub_name", "hub_config", "hub_split", "hub_files")
NOT_READ = {
    "source.about": "words for a reader",
    "source.bad_rows": "malformed rows are left out all the same",
}
OF_HUB = dict.fromkeys([f"source.{key}" for key in PLACES], "of the hub alone")
OF_FILES = dict.fromkeys(["source.files", "source.allow_patterns"], "of files alone")
OF_PLUGIN = {"source.arguments": "of a plugin's source alone"}
NO_FILES = {
    "source.text_field": "its documents have no fields",
    "source.piece_characters": "its documents are not cut from files",
}
OF_HUB_TOO = {"tokenizer.path": "a/b"}
TRAINED = {
    "tokenizer.vocab_size": "of a tokenizer that is trained",
    "tokenizer.sample_megabytes": "of a tokenizer that is trained",
}
HUB = SourceConfig(source="hub", hub_name="a/b", hub_files=["*"], revision="1")
FILES = SourceConfig(source="files", files=["@a"], allow_patterns=["*"])


@dataclass(frozen=True)
class Mixed:
    """A phase of a run that reads text."""

    data: DataConfig
    seed: int
    text: str
    weight: float


def order_of(mixed):
    """Return what is compared when a run resumes."""
    text = SimpleNamespace(fingerprint=mixed.text)
    corpus = Corpus(None, 0, (Part("text", mixed.weight, text),))
    config = SimpleNamespace(data=mixed.data)
    return data_fingerprints(corpus, SimpleNamespace(config=config, seed=mixed.seed))


OF_TEXT = "the text's own fingerprint contains it, or its configuration is compared"
OF_READERS = "how batches are made or read; the run's configuration is compared"
DATA = [*(f.name for f in fields(SourceConfig)), "prepared", "mixture", "cache_dir"]
READERS = ("document_mask", "restart_positions", "first_token_loss", "num_workers")
KEYS = {
    "prepared text of the hub": Key(
        Text(HUB, TokenizerConfig()),
        request,
        {**NOT_READ, **OF_FILES, **OF_PLUGIN}, other=OF_HUB_TOO,
    ),
    "prepared text of files": Key(
        Text(FILES, TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_PLUGIN},
        other=OF_HUB_TOO,
    ),
    "prepared text of Python": Key(
        Text(SourceConfig(), TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **OF_PLUGIN, **NO_FILES}, other=OF_HUB_TOO,
    ),
    "prepared text of a plugin": Key(
        Text(SourceConfig(source="mine"), TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **NO_FILES}, other=OF_HUB_TOO,
    ),
    "prepared text with a tokenizer of the hub": Key(
        Text(SourceConfig(), TokenizerConfig("a/b")),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **OF_PLUGIN, **NO_FILES, **TRAINED},
    ),
    "a listed file": Key(
        File("place/a.txt", "a.txt", 3),
        lambda file: directory_name({"source": "files", "files": [1]}, Listing((file,), "1")),
        {"path": "the same file elsewhere is the same text"},
    ),
    "a listing": Key(
        Listing((File("a", "a", 1),), "1"),
        lambda listing: listing.identity,
        other={"files": (File("b", "b", 1),)},
    ),
    "the order of samples": Key(
        Mixed(DataConfig(needles=replace(DataConfig().needles, share=0.5)), 3, "text", 1.0),
        order_of,
        {
            **{f"data.{name}": OF_TEXT for name in DATA},
            **{f"data.{name}": OF_READERS for name in READERS},
            "weight": "a single text is all of it",
        },
        {"data.mixture": {"text": {"weight": 2.0}}},
    ),
    "data read in one order": Key(DataConfig(), reading, NOT_OF_SAMPLES, {"mixture": {"a": {}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_with_every_leaf_but_those_listed(name):
    assert ignored_leaves(KEYS[name]) == sorted(KEYS[name].without)


@pytest.mark.parametrize("name", ["fingerprint", "held_out_fingerprint"])
def test_a_corpus_is_told_apart_by_texts_weights_and_their_order(name):
    texts = [SimpleNamespace(fingerprint=name) for name in "abc"]

    mixtures = [
        [(0, 1.0), (1, 1.0)], [(0, 1.0), (2, 1.0)], [(2, 1.0), (1, 1.0)], [(0, 2.0), (1, 1.0)],
        [(0, 1.0), (1, 2.0)], [(1, 1.0), (0, 1.0)], [(0, 1.0)],
    ]  # fmt: skip
    corpora = [
        Corpus(None, 0, tuple(Part(str(i), weight, texts[i]) for i, weight in mixture))
        for mixture in mixtures
    ]
    fingerprints = {getattr(corpus, name) for corpus in corpora}
    assert len(fingerprints) == len(mixtures)


@pytest.mark.parametrize("wanted", [request(Text(HUB, TokenizerConfig())), {"source": "files"}])
def test_a_prepared_text_is_told_apart_by_its_request_and_its_source(wanted):
    def fingerprint(request, source):
        manifest = SimpleNamespace(request=request, source=source)
        return Prepared(None, None, 0, None, None, None, manifest).fingerprint

    before = fingerprint(wanted, {"revision": "1"})
    assert fingerprint(wanted, {"revision": "2"}) != before
    assert fingerprint(wanted | {"files": ["elsewhere"]}, {"revision": "1"}) == before
    for key in wanted:
        assert fingerprint(wanted | {key: "other"}, {"revision": "1"}) != before, key
