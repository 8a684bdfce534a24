"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.common.files import partial_directory, write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, durable):
    path = tmp_path / "new" / "file"
    write_atomically(path, "old", durable=durable)

    def full(*_):
        raise OSError("No space left")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new", durable=durable)
    assert [(x.name, x.read_text()) for x in path.parent.iterdir()] == [("file", "old")]


def test_a_durable_write_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced = []
    opened = Path("/proc/self/fd")
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((opened / str(fd)).readlink()))
    write_atomically(tmp_path / "file", "text", durable=True)
    temporary, directory = synced
    assert temporary.parent == directory == tmp_path
    assert temporary.name.startswith(".file.")


def test_a_renamed_directory_stays(tmp_path):
    with partial_directory(tmp_path / "model") as partial:
        (partial / "weights").write_text("whole")
        partial.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
