"""Files are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from trainer.common.files import partial_directory, write_atomically


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
    with partial_directory(tmp_path / "model") as partial:
        (partial / "weights").write_text("whole")
        partial.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
