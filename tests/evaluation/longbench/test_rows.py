"""Files of questions: what is read, and what is refused in one clear sentence."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from trainer.common.errors import UserError
from trainer.evaluation.longbench.rows import KEY, Row, read_rows, root
from trainer.interchange import hub


def test_a_row_is_read_as_it_is_distributed(write_rows):
    # U+2028 is a line end to str.splitlines, and stands unescaped in such files.
    file = write_rows("qasper", {"context": "one\u2028two {braces}"}, {"answers": ["a", "b"]})
    first, second = read_rows(file, Row, KEY)
    assert first == Row("Who?", "one\u2028two {braces}", ["Alice"], 3)
    assert second.answers == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "Invalid JSON"),
        ("[]", "object"),
        ('{"context": "c", "answers": ["a"], "length": 1}', "input: Field required"),
        ('{"input": "i", "context": 5, "answers": ["a"], "length": 1}', "context: .*string"),
        ('{"input": "i", "context": "c", "answers": [], "length": 1}', "answers: .*at least 1"),
        ('{"input": "i", "context": "c", "answers": [1], "length": 1}', "answers.0: .*string"),
    ],
)
def test_the_first_malformed_line_is_named(write_rows, line, fault):
    file = write_rows("qasper", {}, {})
    file.write_text(file.read_text() + f"\n{line}\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"{KEY}: '{re.escape(str(file))}' line 4: .*{fault}"):
        read_rows(file, Row, KEY)


def test_empty_and_binary_files_are_refused(tmp_path):
    file = tmp_path / "qasper.jsonl"
    for content, fault in [(b"\n", "is empty"), (b"\xff\xfe", "not UTF-8"), (None, "cannot be")]:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UserError, match=fault):
            read_rows(file, Row, KEY)


def test_the_hubs_archive_is_read_without_unpacking(write_rows, tmp_path, monkeypatch):
    file = write_rows("qasper", {"input": "Wo saß Ärne?"})
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.write(file, "data/qasper.jsonl")
    asked = []

    def download(*where, **kind):
        asked.append((where, kind))
        return str(archive)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    rows = read_rows(root(None) / "qasper.jsonl", Row, KEY)
    assert [row.input for row in rows] == ["Wo saß Ärne?"]
    # What is on this machine is not asked for.
    where = ("THUDM/LongBench", "data.zip")
    assert asked == [(where, {"repo_type": "dataset", "local_files_only": True})]
    assert not (root(None) / "lcc.jsonl").is_file()


def test_without_a_network_the_hub_is_not_asked(monkeypatch):
    """Its client would try again for half a minute."""
    asked = []

    def nothing_here(*_, **options):
        asked.append(options)
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing_here)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(UserError, match=r"could not be loaded .*\(no network: .*refused\)"):
        root(None)
    assert [options.get("local_files_only") for options in asked] == [True]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        root(None)


def test_without_hub_or_directory_one_sentence_says_what_to_give(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("no network\nand much more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(UserError) as caught:
        root(None)
    assert len(caught.value.problems) == 1
    assert "no network" in str(caught.value)
    assert "more" not in str(caught.value)
    (tmp_path / "no.zip").write_bytes(b"no archive")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: tmp_path / "no.zip")
    with pytest.raises(UserError, match="not a zip file"):
        root(None)
    assert root("here") == Path("here")
