"""One process at a time, on every file system."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from trainer.common.errors import UserError
from trainer.common.locks import locked


def test_the_holder_is_named(tmp_path):
    me = f"process {os.getpid()} of {os.uname().nodename}"
    with (
        locked(tmp_path / "lock", "data", ""),
        pytest.raises(UserError, match=f"^here: {me} works\\.$"),
        locked(tmp_path / "lock", "here", "works"),
    ):
        pass
    with locked(tmp_path / "lock", "data", ""):
        pass


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog, answer):
    """Lustre mounted with ``noflock``, for one."""

    def flock(*_):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "lock", "data", ""):
        pass
    assert "cannot be locked on this file system" in caplog.text


def test_any_other_failure_is_raised(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock", "data", ""):
        pass
