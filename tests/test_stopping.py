"""Work that only writes whole files leaves nothing temporary, however it ends."""

from __future__ import annotations

import os
import signal

import pytest

from trainer.common.errors import PreemptedError
from trainer.stopping import partial_directory, stopping_at_once


@pytest.mark.parametrize("kept", [True, False])
def test_a_signal_ends_the_work_and_what_is_half_written_goes(tmp_path, kept):
    def work():
        with (
            stopping_at_once("Stopped", signal.SIGTERM, kept=kept),
            partial_directory(tmp_path / "model") as partial,
        ):
            (partial / "weights").write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError, match=r"Stopped \(SIGTERM\)") as stop:
        work()
    assert stop.value.kept == kept
    assert not list(tmp_path.iterdir())


def test_what_is_renamed_stays(tmp_path):
    with partial_directory(tmp_path / "model") as partial:
        (partial / "weights").write_text("whole")
        partial.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_killed_processes_left_is_swept_and_what_others_write_is_not(tmp_path):
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    here = os.uname().nodename
    left = [f".a[b].partial-{here}-{process}"]
    others = [
        f".a[b].partial-{here}-{os.getppid()}",
        f".a[b].partial-elsewhere-{process}",
        f".ab.partial-{here}-{process}",
        ".a[b].partial-of-mine",
    ]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
    with partial_directory(tmp_path / "a[b]"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
