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


def test_processes_with_one_id_on_two_machines_may_write_the_same_file(tmp_path, monkeypatch):
    path, replace = tmp_path / "file", Path.replace

    def interrupted(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        write_atomically(path, "second")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    write_atomically(path, b"first")
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("file", "first")]


def test_a_renamed_directory_stays(tmp_path):
    with partial_directory(tmp_path / "model") as partial:
        (partial / "weights").write_text("whole")
        partial.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_partial_directories_of_killed_processes_are_removed_and_no_others(tmp_path):
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    node = os.uname().nodename
    others = [
        f".a[b].partial-{node}-{os.getppid()}",
        f".a[b].partial-elsewhere-{process}",
        f".ab.partial-{node}-{process}",
        ".a[b].partial-of-mine",
    ]
    for name in (f".a[b].partial-{node}-{process}", *others):
        (tmp_path / name).mkdir()
    with partial_directory(tmp_path / "a[b]"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
