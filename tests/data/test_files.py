"""Files of text, whatever they are called and however they are damaged."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.common.errors import UserError
from trainer.data import files
from trainer.data.files import PIECE, BadRow, find_files, read_rows

TEXTS = ["one", "zwei ü", "three\nlines\u2028here"]


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":  # two members, as concatenated files have
        return gzip.compress(content[:9]) + gzip.compress(content[9:])
    return bytes(pa.compress(content, codec="zstd")) if suffix == ".zst" else content


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_is_one_document_a_line_compressed_or_not(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    lines = "".join(json.dumps({"body": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    path.write_bytes(compressed((lines + "\n").encode(), suffix))
    assert list(read_rows(str(path), "body")) == TEXTS


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_tables_are_one_document_a_row(tmp_path, kind):
    table = pa.table({"id": range(600), "text": [f"text {i}" for i in range(600)]})
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=100)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with path.open("wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    assert list(read_rows(str(path), "text")) == [f"text {i}" for i in range(600)]


@pytest.mark.parametrize("read", [7, 1000, 1 << 20])
def test_a_long_text_becomes_documents_that_can_be_split(tmp_path, monkeypatch, read):
    """The same text comes back, whatever pieces it is read in, and through characters of several
    bytes and line ends of two."""
    monkeypatch.setattr(files, "READ", read)
    text = "".join(f"Line {i} – ü.\r\n" for i in range(2_000)) + "x" * 20_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    documents = list(read_rows(str(tmp_path / "a.txt"), "text"))
    assert "".join(documents) == text
    assert max(map(len, documents)) <= 2 * PIECE
    assert len(documents) >= len(text) // (2 * PIECE)


def test_the_length_of_the_documents_of_a_long_text_may_be_chosen(tmp_path):
    text = "".join(f"Line {i}.\n" for i in range(2_000))
    path = tmp_path / "a.md.gz"
    path.write_bytes(gzip.compress(text.encode()))
    documents = list(read_rows(str(path), "text", 100))
    assert "".join(documents) == text
    assert all(100 <= len(document) < 112 for document in documents[:-1])  # to a line's end
    assert list(read_rows(str(path), "text", None)) == [text]


def test_a_file_that_is_one_document_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1 << 20)
    path = tmp_path / "a.txt"
    path.write_text("x" * (1 << 20))
    assert [len(text) for text in read_rows(str(path), "text", None)] == [1 << 20]
    path.write_text("x" * (1 << 20) + "\n")
    (row,) = read_rows(str(path), "text", None)
    assert row == BadRow(repr(str(path)), "is longer than 1 MiB as one document")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "a\0b"}', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b'{"body": "x"}', "no 'text' .*it has 'body'"),
        (b'{"text": null}', "no text under 'text' but null"),
        (b'{"text": 17}', "no text under 'text' but 17"),
        (b"[1]", r"is no object but \[1\]"),
        (b"[" * 100_000, "is not JSON"),
        (b'"' + b"x" * 300 + b'"', "is longer than"),
    ],
    ids=range(9),
)
def test_a_malformed_line_is_named_and_the_others_are_read(tmp_path, monkeypatch, line, problem):
    monkeypatch.setattr(files, "LONGEST", 200 if b"xxx" in line else 1 << 20)
    monkeypatch.setattr(files, "READ", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = read_rows(str(path), "text")
    assert (before, after) == ("before", "after")
    assert isinstance(bad, BadRow)
    assert bad.place.endswith("a.jsonl' line 2")
    assert re.search(problem, bad.problem)


@pytest.mark.parametrize("read", [10, 33, 1000])
def test_the_longest_line_is_read_wherever_a_piece_of_the_file_ends(tmp_path, monkeypatch, read):
    monkeypatch.setattr(files, "LONGEST", 100)
    monkeypatch.setattr(files, "READ", read)
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "' + b"x" * (size - 12) + b'"}' for size in (100, 101, 100)]
    path.write_bytes(b"\n".join(lines))
    first, bad, last = read_rows(str(path), "text")
    assert first == last == "x" * 88
    assert isinstance(bad, BadRow)


def test_a_line_without_end_needs_no_memory_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    monkeypatch.setattr(files, "READ", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 50_000 + b'"}\n{"text": "after"}')
    bad, after = read_rows(str(path), "text")
    assert (type(bad), after) == (BadRow, "after")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff\xfe", "not UTF-8 text, at about byte 3"),
        ("a.txt", b"abc\xc3", "not UTF-8 text"),
        ("a.txt", b"abc\0", "is not text: byte 3 is NUL"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-12],
            "cannot be read to its end",
        ),
        ("a.jsonl.zst", bytes(pa.compress(b"x" * 9000, codec="zstd"))[:-5], "cannot be read"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.parquet", b"no parquet", "cannot be read"),
        ("a.arrow", b"no arrow at all", "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(read_rows(str(tmp_path / name), "text"))
    assert name in str(error.value)


def test_a_table_without_the_field_says_which_it_has(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no field 'text'; it has body"):
        list(read_rows(str(tmp_path / "a.parquet"), "text"))


def test_files_directories_and_globs_give_files_in_order_of_their_names(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in (
        "b.txt",
        "a.jsonl.gz",
        "deep/er/c.parquet",
        "notes.md",
        ".hidden.txt",
        "d[1].txt",
        "_e.txt",
    ):
        (tmp_path / name).write_text("x")

    def names(*patterns):
        return [f.name for f in find_files([str(tmp_path / p) for p in patterns], "data.files")]

    assert names("") == [
        "_e.txt",
        "a.jsonl.gz",
        "b.txt",
        "d[1].txt",
        "deep/er/c.parquet",
    ]
    assert names("b.txt", "a.jsonl.gz") == ["a.jsonl.gz", "b.txt"]
    assert names("*.txt") == ["_e.txt", "b.txt", "d[1].txt"]
    assert names(".*.txt") == [".hidden.txt"]
    assert names("d[1].txt") == ["d[1].txt"]
    assert names("**/*.parquet") == ["c.parquet"]


def test_links_are_followed_and_a_file_counts_once(tmp_path, monkeypatch):
    """The Hugging Face cache consists of links."""
    (tmp_path / "blobs").mkdir()
    for name in ("x", "y"):
        (tmp_path / "blobs" / name).write_text("x")
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "blobs" / "x")
    (tmp_path / "texts" / "deep" / "b.txt").symlink_to(tmp_path / "blobs" / "y")
    (tmp_path / "texts" / "deep" / "round").symlink_to(tmp_path / "texts")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "c.txt").write_text("x")
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "far")
    monkeypatch.chdir(tmp_path)
    names = ["a.txt", "deep/b.txt", "linked/c.txt"]
    for patterns in (
        ["texts"],
        ["texts/*.txt", "texts/deep/*.txt", "texts/linked/*.txt"],
        ["texts", "./texts/a.txt", str(tmp_path / "texts")],
    ):
        files = find_files(patterns, "data.files")
        assert [file.name for file in files] == names, patterns
        assert [file.size for file in files] == [1, 1, 1]


def test_what_cannot_be_read_in_a_directory_is_an_error_not_less_text(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"'.*/gone.txt' cannot be read: No such file"):
        find_files([str(tmp_path)], "data.files")
    (tmp_path / "gone.txt").unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"'.*/pipe.txt' cannot be read: it is no regular file"):
        find_files([str(tmp_path)], "data.files")
    with pytest.raises(UserError, match="an empty address"):
        find_files([""], "data.files")


def test_markup_is_plain_text_where_its_ending_is_named(tmp_path):
    """A directory of data may hold a README.md that belongs to no text."""
    import fsspec

    memory = fsspec.filesystem("memory")
    names = ("README.md", "a.txt", "b.md.gz", "c.rst")
    for name in names:
        (tmp_path / name).write_text("x")
        memory.pipe(f"/markup/{name}", b"x")

    def named(place, pattern):
        return [Path(file.path).name for file in find_files([f"{place}/{pattern}"], "data.files")]

    for place in (tmp_path, "memory://markup"):
        assert named(place, "") == ["a.txt"]
        assert named(place, "*") == ["a.txt"]
        assert named(place, "*.md") == ["README.md"]
        assert named(place, "*.md.gz") == ["b.md.gz"]
        assert named(place, "c.rst") == ["c.rst"]
    assert list(read_rows(str(tmp_path / "README.md"), "")) == ["x"]
    with pytest.raises(UserError, match=r"such as 'texts/\*\.md'"):
        find_files([str(tmp_path / "*.none")], "data.files")


def test_every_file_that_is_none_is_named_at_once(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.csv").write_text("x")
    patterns = [str(tmp_path / name) for name in ("missing.txt", "empty.txt", "a.csv", "*.nothing")]
    with pytest.raises(UserError) as error:
        find_files(patterns, "data.files")
    sentence = " ".join(map(str, error.value.problems))
    assert len(error.value.problems) == 4
    for expected in ("there is no file", "is empty", "is not in .txt", "names no file"):
        assert expected in sentence


def test_addresses_of_other_file_systems_are_read_as_files_here():
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/texts/{name}.jsonl", json.dumps({"text": name}).encode())
    files = find_files(["memory://texts/*.jsonl"], "data.files")
    assert [file.name for file in files] == ["a.jsonl", "b.jsonl"]
    assert [row for file in files for row in read_rows(file.path, "text")] == ["a", "b"]
    with pytest.raises(UserError, match="nowhere:"):
        find_files(["nowhere://x.txt"], "data.files")
