"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from trainer.common.files import write_atomically


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_atomically(path, "old")

    def full(self, data):
        self.touch()
        raise OSError("No space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert [(x.name, x.read_text()) for x in path.parent.iterdir()] == [("file", "old")]


def test_processes_with_one_id_on_two_machines_may_write_the_same_file(tmp_path, monkeypatch):
    path, replace = tmp_path / "file", Path.replace

    def interrupted(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        write_atomically(path, "second")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    write_atomically(path, b"first")
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("file", "first")]
