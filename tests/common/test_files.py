"""Files are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from trainer.common.errors import UserError
from trainer.common.files import check_is_new, expecting, partial_directory, write_atomically


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_atomically(path, "old")

    def full(*_):
        raise OSError("No space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert [(x.name, x.read_text()) for x in path.parent.iterdir()] == [("file", "old")]


def test_a_renamed_directory_stays(tmp_path):
    (tmp_path / ".model.partial").mkdir()  # which a kill has left
    with partial_directory(tmp_path / "model") as partial:
        (partial / "weights").write_text("whole")
        partial.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("line 1\nline 2"), "line 1"),
        (ValueError(), "ValueError"),
        (KeyError(), "KeyError"),
        (OSError("Not a gzipped file"), "Not a gzipped file"),
    ],
)
def test_an_error_of_a_parser_names_the_file(tmp_path, error, reason):
    with pytest.raises(UserError) as raised, expecting("JSON", tmp_path / "a.json"):
        raise error
    assert str(raised.value) == f"{tmp_path / 'a.json'}: expected JSON ({reason})"


def test_an_export_is_written_where_nothing_lies(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "absent"):
        check_is_new(tmp_path / name)
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=r"^to: expected a new or empty directory"):
            check_is_new(str(place))
