"""Prepared text on disk: found without its source, and checked before it is read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from trainer.common.errors import UserError
from trainer.data import preparing
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.files import find_files
from trainer.data.plan import make_plan
from trainer.data.prepared import cache_directory, open_prepared, verify
from trainer.data.preparing import Preparation
from trainer.data.shards import OPEN, Place, Shard, TokenStream
from trainer.data.sources import Listing
from trainer.data.tokenizer import TextTokenizer, end_of_text, load_tokenizer, train_tokenizer

BPE = TokenizerConfig(vocab_size=300)


@pytest.fixture
def directory(config):
    """Of a text that is prepared."""
    work = Preparation.find(config, BPE, None)
    work.run(workers=1)
    return work.directory


def test_text_is_found_without_its_source_and_under_other_paths(config, directory, tmp_path):
    (tmp_path / "texts").rename(tmp_path / "moved")
    assert Preparation.find(config, BPE, None).directory == directory
    moved = replace(config, files=[str(tmp_path / "moved")])
    assert Preparation.find(moved, BPE, None).directory == directory
    elsewhere = replace(config, files=["gone"], prepared=str(directory))
    assert prepare_corpus(elsewhere, BPE).fingerprint == open_prepared(directory).fingerprint


def test_text_taken_as_it_is_has_the_tokens_of_the_model(config, directory, tmp_path):
    other = train_tokenizer(["some other words"], 260, [])
    path = tmp_path / "other.json"
    other.save(str(path))
    config = replace(config, prepared=str(directory))
    with pytest.raises(UserError, match=r"another tokenizer than tokenizer\.path=.*other"):
        prepare_corpus(config, TokenizerConfig(path=str(path)))
    with pytest.raises(UserError, match="another tokenizer than the model's"):
        prepare_corpus(config, BPE, TextTokenizer(other))
    tokenizer_path = str(directory / "tokenizer.json")
    assert prepare_corpus(config, TokenizerConfig(path=tokenizer_path)).directories == [
        str(directory)
    ]


def test_what_a_tokenizer_puts_around_a_text_makes_it_no_other(config, directory, tmp_path):
    """An exported model says that texts begin with a token, and some cut or fill them."""
    tokenizer = open_prepared(directory).tokenizer
    end = tokenizer.id_to_token(end_of_text(tokenizer))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "published.json"))
    as_it_is = replace(config, prepared=str(directory))
    read = TokenizerConfig(path=str(tmp_path / "published.json"))
    assert prepare_corpus(as_it_is, read).directories == [str(directory)]
    text = "some words that are more than four tokens"
    loaded = load_tokenizer(str(tmp_path / "published.json")).tokenizer
    result = loaded.encode(text, add_special_tokens=False)
    assert len(result.ids) > 4
    assert result.ids == open_prepared(directory).tokenizer.encode(text).ids


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_cache_that_cannot_be_is_one_line(config, tmp_path, name):
    (tmp_path / "file").touch()
    config = replace(config, cache_dir=str(tmp_path / name))
    with pytest.raises(UserError, match=r"data\.cache_dir: .* cannot be written"):
        prepare_corpus(config, BPE)


def test_text_that_is_nowhere_says_what_is_missing(config):
    with pytest.raises(UserError, match="there is no file 'gone'"):
        Preparation.find(replace(config, files=["gone"]), BPE, None)


def test_a_fingerprint_is_of_the_request_and_the_source_but_not_of_where_it_lies(directory):
    text = open_prepared(directory)

    def fingerprint(**changes):
        return replace(text, manifest=replace(text.manifest, **changes)).fingerprint

    asked = text.manifest.request
    assert fingerprint(request=asked | {"files": ["elsewhere"]}) == text.fingerprint
    assert fingerprint(request=asked | {"validation": 0.5}) != text.fingerprint
    assert fingerprint(source={"files": []}) != text.fingerprint


def test_a_source_of_another_size_is_another_text(config, directory, tmp_path):
    with (tmp_path / "texts" / "0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    work = Preparation.find(config, BPE, None)
    assert work.directory != directory
    assert not work.is_done


def test_another_request_is_another_text_and_other_sequences_are_the_same(config, directory):
    for change in ({"sequence_length": 99}, {"bad_rows": 0.5}, {"document_mask": True}):
        assert Preparation.find(replace(config, **change), BPE, None).directory == directory
    other = replace(config, min_characters=50)
    assert Preparation.find(other, BPE, None).directory != directory


def harm(directory, damage):
    shard = directory / "train-00000-0000.bin"
    manifest = directory / "manifest.json"
    plain = json.loads(manifest.read_text())
    match damage:
        case "cut":
            os.truncate(shard, shard.stat().st_size - 2)
        case "missing":
            shard.unlink()
        case "ends":
            (directory / "train-00000-0000.ends").unlink()
        case "manifest":
            manifest.write_text("{")
        case "list":
            manifest.write_text("[]")
        case "keys":
            manifest.write_text(json.dumps({"format": 2}))
        case "newer":
            manifest.write_text(json.dumps({**plain, "format": 3}))
        case "older":
            manifest.write_text(json.dumps({**plain, "format": 1}))
        case "unfinished":
            manifest.unlink()
        case "tokenizer":
            (directory / "tokenizer.json").write_text("{}")
        case "no tokenizer":
            (directory / "tokenizer.json").write_text("{}")
            checksum = hashlib.sha256(b"{}").hexdigest()
            manifest.write_text(json.dumps({**plain, "tokenizer_sha256": checksum}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"train-00000-0000\.bin has .* bytes instead of"),
        ("missing", r"train-00000-0000\.bin is missing"),
        ("ends", r"train-00000-0000\.ends is missing"),
        ("manifest", "damaged: its manifest cannot be read"),
        ("list", "damaged: its manifest cannot be read"),
        ("keys", "damaged"),
        ("newer", "has format 3, .*reads up to 2"),
        ("older", "has format 1, which is no longer read"),
        ("unfinished", "was not finished; the command that began it goes on"),
        ("tokenizer", r"tokenizer\.json is not what was written"),
        ("no tokenizer", r"tokenizer\.json: Model missing"),
    ],
)
def test_damage_is_one_line_that_names_the_directory(directory, damage, message):
    harm(directory, damage)
    with pytest.raises(UserError, match=message) as error:
        open_prepared(directory)
    (problem,) = map(str, error.value.problems)
    assert str(directory) in problem
    assert "\n" not in problem


def test_a_dataset_of_the_hub_keeps_its_commit(config, monkeypatch):
    """The hub's newest commit may come between two jobs, or two parts."""
    files = tuple(find_files(config.files, "data.files"))
    listing = {"now": Listing(files, "first")}
    monkeypatch.setattr(preparing, "list_source", lambda _: listing["now"])
    config = replace(config, source="hub", hub_name="some/text", files=[])
    begun = Preparation.find(config, BPE, None, network=True)
    make_plan(config, BPE, None, listing["now"]).write(begun.directory)
    listing["now"] = Listing(files, "second")
    work = Preparation.find(config, BPE, None, network=True)
    assert work.directory == begun.directory
    assert work.run(workers=1)
    again = Preparation.find(config, BPE, None, network=True)
    assert again.is_done
    assert open_prepared(again.directory).manifest.source["revision"] == "first"
    named = Preparation.find(replace(config, revision="second"), BPE, None, network=True)
    assert not named.is_done


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shards", "train", 0, "name"), "../../../evil"),
        (("shards", "train", 0, "name"), "/etc/passwd"),
        (("shards", "train", 0, "name"), "train-00000-0000\0"),
        (("shards", "train", 0, "tokens"), "129"),
        (("shards", "train", 0, "tokens"), None),
        (("shards", "train", 0, "tokens"), -1),
        (("shards", "train"), {}),
        (("end_of_text",), -1),
        (("end_of_text",), 10**6),
        (("end_of_text",), 10**12),
        (("end_of_text",), 1.5),
        (("dtype",), ">u2"),
        (("request",), [1]),
        (("source",), None),
        (("bad_rows",), "none"),
        (("tokens",), [1, 2, 3]),
        (("format",), True),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_damaged(directory, path, value):
    file = directory / "manifest.json"
    manifest = json.loads(file.read_text())
    group = manifest
    for key in path[:-1]:
        group = group[key]
    group[path[-1]] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is damaged") as error:
        open_prepared(directory)
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"rows": 1}'])
def test_a_record_of_other_content_is_damaged(config, directory, content):
    (directory / "manifest.json").unlink()
    (directory / "pieces" / "00000-0000.json").write_text(content)
    with pytest.raises(UserError, match=r"00000-0000.json' is damaged \(.*\); remove it"):
        Preparation.find(config, BPE, None).run(workers=1)


@pytest.mark.parametrize(
    "change",
    [{"units": [[7]]}, {"units": ["x"]}, {"tokenizer": "{}"}, {"dtype": "zz"}, {"files": 3}],
)
def test_a_plan_of_other_content_is_damaged(config, directory, change):
    (directory / "manifest.json").unlink()
    plan = directory / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    with pytest.raises(UserError, match=r"the plan in .* is damaged .*; remove the directory"):
        Preparation.find(config, BPE, None).run(workers=1)


def test_no_manifest_is_written_over_a_shard_that_is_gone(config, directory):
    (directory / "manifest.json").unlink()
    (directory / "train-00000-0000.bin").unlink()
    with pytest.raises(UserError, match=r"train-00000-0000.bin is missing; remove the directory"):
        Preparation.find(config, BPE, None).run(workers=1)
    assert not (directory / "manifest.json").exists()


def test_a_flipped_bit_is_found_on_demand(directory):
    text = open_prepared(directory)
    assert verify(text, 2) == []
    for name in ("train-00000-0000.bin", "test-00000-0000.ends"):
        path = directory / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert verify(text, 2) == [
        "train-00000-0000.bin is not what was written",
        "test-00000-0000.ends is not what was written",
    ]


def test_ids_that_are_no_tokens_are_named_where_they_are_read(directory):
    """They would end a training in the middle of a kernel."""
    text = open_prepared(directory)
    path, size = directory / "train-00000-0000.bin", text.tokenizer.get_vocab_size()
    ids = np.fromfile(path, "<u2")
    ids[[3, 40]] = size - 1, size
    path.write_bytes(ids.tobytes())
    stream = open_prepared(directory).train
    assert stream.windows(np.array([0]), 40)[0, 3] == size - 1
    message = f"'{path}' is damaged: it holds the id {size}, and those of the tokenizer end at "
    message += f"{size - 1}; remove the directory and prepare it again."
    for train in (stream, pickle.loads(pickle.dumps(stream))):
        with pytest.raises(UserError, match=re.escape(message)):
            train.windows(np.array([0]), 41)
        with pytest.raises(UserError, match=re.escape(message)):
            train.documents(len(ids))


def test_a_hundred_billion_tokens_open_at_once_and_read_anywhere(tmp_path):
    """Sparse files stand in for 400 shards; only what is read is opened."""
    size = 250_000_000
    places = []
    for index in range(400):
        shard = Shard(f"train-{index}", size, 1, "", "")
        path = tmp_path / f"train-{index}.bin"
        with path.open("wb") as file:
            file.truncate(2 * size)
        places.append(Place(tmp_path, shard, "<u2"))
    with (tmp_path / "train-399.bin").open("r+b") as file:
        file.seek(2 * (size - 3))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    stream = TokenStream(places)
    assert len(stream) == 10**11
    np.testing.assert_array_equal(stream.windows(np.array([10**11 - 4]), 4), [[0, 7, 8, 9]])
    across = stream.windows(np.array([size - 2, 17]), 4)
    assert across.shape == (2, 4)
    assert open_below(tmp_path) == 3
    stream.windows(np.arange(0, 10**11, size), 4)
    assert open_below(tmp_path) == OPEN
    again = pickle.loads(pickle.dumps(stream))
    assert open_below(tmp_path) == OPEN
    np.testing.assert_array_equal(again.windows(np.array([10**11 - 4]), 4), [[0, 7, 8, 9]])


def open_below(directory):
    """Files of a directory that this process has open."""
    paths = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(path.startswith(str(directory)) for path in paths)


def test_a_shard_that_is_cut_while_it_is_read_is_an_error(directory):
    """A page of a map that is not there would kill the process."""
    stream = open_prepared(directory).train
    stream.windows(np.array([0]), 8)
    place = stream.places[0]
    path = place.directory / f"{place.shard.name}.bin"
    os.truncate(path, 16)
    with pytest.raises(UserError, match=r"train-.*\.bin' cannot be read: it ends early"):
        stream.windows(np.array([place.shard.tokens - 8]), 8)


@pytest.mark.parametrize(
    ("number", "transient"), [(errno.EIO, True), (errno.ESTALE, True), (errno.EACCES, False)]
)
def test_what_a_disk_does_while_a_shard_is_read_is_no_mistake(
    directory, monkeypatch, number, transient
):
    """A job is then tried again; not where the file may not be read."""

    def failing(*_):
        raise OSError(number, os.strerror(number))

    stream = open_prepared(directory).train
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(UserError, match=r"train-.*\.bin' cannot be read: ") as raised:
        stream.windows(np.array([0]), 8)
    assert raised.value.is_transient == transient


CACHES = {
    "none": ({}, "home/.cache/unrope"),
    "empty": ({"UNROPE_CACHE": "", "XDG_CACHE_HOME": ""}, "home/.cache/unrope"),
    "of the system": ({"XDG_CACHE_HOME": "system"}, "system/unrope"),
    "of this program": ({"UNROPE_CACHE": "own", "XDG_CACHE_HOME": "system"}, "own"),
}


@pytest.mark.parametrize("kind", CACHES)
def test_where_prepared_text_lies(monkeypatch, kind):
    variables, expected = CACHES[kind]
    for name in ("UNROPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "home")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory(DataConfig()) == Path(expected)
