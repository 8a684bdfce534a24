"""One process at a time, on every file system."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from trainer.errors import UserError
from trainer.lock import locked
from trainer.runs.directory import RunLock


def test_the_holder_is_named(tmp_path):
    me = f"process {os.getpid()} of {os.uname().nodename}"
    with (
        locked(tmp_path / "lock", ""),
        pytest.raises(UserError, match=f"^here: {me} works$"),
        locked(tmp_path / "lock", "here: {holder} works"),
    ):
        pass
    with locked(tmp_path / "lock", ""):
        pass


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog, answer):
    """Lustre mounted with ``noflock``, for one."""

    def flock(*_):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock()
    lock.acquire(tmp_path)
    lock.release()
    assert "cannot be locked on this file system" in caplog.text


def test_any_other_failure_is_raised(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock", ""):
        pass


def test_a_run_directory_is_locked_once_however_often_it_is_asked_for(tmp_path):
    lock, other = RunLock(), RunLock()
    lock.acquire(tmp_path)
    lock.acquire(tmp_path)
    with pytest.raises(UserError, match=r"run_dir: process \d+ of .* is training in"):
        other.acquire(tmp_path)
    lock.release()
    other.acquire(tmp_path)
    other.release()
