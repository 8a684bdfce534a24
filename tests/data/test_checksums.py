"""Checksums of prepared text: what is damaged, and how often it is read."""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.common.errors import UserError
from trainer.config import TokenizerConfig
from trainer.data import checksums
from trainer.data.checksums import check_once, checksums_once
from trainer.data.corpus import corpus_at, prepare_corpus
from trainer.data.prepared import prepare

BPE = TokenizerConfig(vocab_size=300)
FILES = ["tokenizer.json", "train.bin", "validation.bin", "test.bin"]


def flip(path, byte):
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.fixture
def reads(monkeypatch):
    """The pieces that are read."""
    pieces, read = [], checksums._checksum

    def noted(path, start):
        pieces.append((path.name, start))
        return read(path, start)

    monkeypatch.setattr(checksums, "_checksum", noted)
    return pieces


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 192, 200])
def test_a_checksum_is_of_each_piece_and_of_all_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksums, "PIECE", 64)
    monkeypatch.setattr(checksums, "BLOCK", 24)
    content = bytes(i * i % 251 for i in range(size))
    (tmp_path / "a.bin").write_bytes(content)
    pieces = [content[start : start + 64] for start in range(0, size, 64)]
    expected = [hashlib.sha256(piece).hexdigest()[:16] for piece in pieces]
    assert checksums.checksums([tmp_path / "a.bin"]) == {"a.bin": expected}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("byte", [0, -1])
def test_a_flipped_bit_is_found_before_training(config, name, byte):
    directory = prepare(config, BPE)
    flip(directory / name, byte)
    with pytest.raises(UserError, match=rf"{name}: expected the bytes that were prepared"):
        prepare_corpus(config, BPE)
    with pytest.raises(UserError, match=rf"{name}: expected the bytes that were prepared"):
        corpus_at(config, [directory])  # nothing remembers that it was checked
    flip(directory / name, byte)
    assert prepare_corpus(config, BPE).parts


def test_a_machine_reads_a_text_once_until_it_changes(config, reads, monkeypatch, tmp_path):
    directory = prepare(config, BPE)
    reads.clear()  # of what was written
    for _ in range(3):
        prepare_corpus(config, BPE)
    assert sorted(reads) == sorted((name, 0) for name in FILES)
    path = directory / "train.bin"
    os.utime(path, ns=(1, 1))
    prepare_corpus(config, BPE)
    assert len(reads) == 8
    monkeypatch.setattr("platform.node", lambda: "another")
    prepare_corpus(config, BPE)
    assert len(reads) == 12
    flip(path, 5)
    with pytest.raises(UserError, match=r"train\.bin: expected the bytes"):
        prepare_corpus(config, BPE)


def test_text_of_older_versions_is_said_to_have_no_checksums_once(config, caplog):
    directory = prepare(config, BPE)
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    assert list(manifest.pop("checksums")) == FILES
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    flip(directory / "train.bin", 5)
    for _ in range(3):
        assert prepare_corpus(config, BPE).parts
    assert caplog.text.count("no checksums") == 1


def test_a_text_at_another_place_is_another(tmp_path, reads):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "train.bin").write_bytes(b"some bytes")
    expected = checksums.checksums([tmp_path / "a" / "train.bin"])
    for place in ("a", "b", "a", "b"):
        check_once(tmp_path / place, expected, tmp_path / "cache")
    assert len(reads) == 1 + 2


def test_other_files_of_the_same_directory_are_read_of_their_own(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"text {name}")
        os.utime(tmp_path / name, ns=(1, 1))
    sums = [checksums_once(tmp_path, [name], tmp_path / "cache") for name in "ab"]
    assert sums == [checksums.checksums([tmp_path / name]) for name in "ab"]


def test_of_several_processes_one_reads_and_the_others_wait(tmp_path, reads, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    read = checksums.checksums

    def slowly(paths):
        time.sleep(0.3)
        return read(paths)

    monkeypatch.setattr(checksums, "checksums", slowly)

    def once(_):
        return checksums_once(tmp_path, ["a.bin"], tmp_path / "cache")

    with ThreadPoolExecutor(3) as threads:
        sums = [*threads.map(once, range(3))]
    assert sums == [read([tmp_path / "a.bin"])] * 3
    assert len(reads) == 1 + 1  # and the one of this test


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_cache_that_is_damaged_or_cannot_be_written_only_costs_time(tmp_path, reads, content):
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    (tmp_path / "file").write_bytes(content)
    expected = checksums_once(tmp_path, ["a.bin"], tmp_path / "cache")
    (record,) = [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ""][2:]
    record.write_bytes(content)
    for place in ("cache", "cache", "file", "file"):
        assert checksums_once(tmp_path, ["a.bin"], tmp_path / place) == expected
    assert len(reads) == 1 + 1 + 2
