"""Text sources and their errors."""

from __future__ import annotations

import json

import pytest

from trainer.data.config import DataConfig
from trainer.data.sources import read_documents, read_files, stdlib_docs
from trainer.errors import UserError


@pytest.fixture(scope="module")
def docs():
    return stdlib_docs()


def test_stdlib_docs_are_megabytes_of_clean_prose(docs):
    assert 1.5e6 < sum(map(len, docs)) < 4e6
    assert len(set(docs)) == len(docs)
    assert all(text.isascii() and text.isprintable() for text in docs)


def test_stdlib_docs_hold_what_pydoc_shows(docs):
    import textwrap

    folded = " ".join(textwrap.dedent(textwrap.TextWrapper.__doc__).split())
    assert any(folded[:60] in text for text in docs)


def test_documents_come_in_the_same_order_whatever_order_files_have(tmp_path):
    names = []
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
        names.append(str(tmp_path / f"{i}.txt"))
    forwards, backwards = (
        read_documents(DataConfig(source="files", files=order)) for order in (names, names[::-1])
    )
    assert forwards == backwards
    assert sorted(forwards) == [f"document {i}" for i in range(5)]


def test_jsonl_is_one_document_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"text {i}"}) for i in range(3)) + "\n\n")
    assert read_files([str(path)], "body") == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8"),
        ("a.csv", b"x", "not a .txt or .jsonl"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl", b'{"body": "x"}', "no text under 'text'.*body"),
        ("a.jsonl", b"[1]", "no text under 'text'.*list"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_files([str(tmp_path / name)], "text")


def test_all_bad_files_are_named_at_once(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError) as error:
        read_files([str(tmp_path / "missing.txt"), str(tmp_path / "empty.txt")], "text")
    assert len(error.value.problems) == 2


def test_hub_dataset_that_cannot_be_had_says_what_is_missing(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"'some/text' .* not on this machine"):
        read_documents(DataConfig(source="hub", hub_name="some/text"))


def test_one_long_text_becomes_documents_that_can_be_split(tmp_path):
    text = "".join(f"Line {i}.\n" for i in range(20_000)) + "x" * 50_000
    path = tmp_path / "a.txt"
    path.write_text(text)
    documents = read_files([str(path)], "text")
    assert "".join(documents) == text
    assert max(map(len, documents)) <= 2 * 8192
    assert len(documents) > len(text) // (2 * 8192)
