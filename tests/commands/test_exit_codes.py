"""How the program ends when it is not its own fault, and what a person sees of it."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainer.commands.exit_codes import exit_codes
from trainer.common.errors import PreemptedError, Problem, UserError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a")
ENDS = {
    "full disk": (FULL, 2, "error: 'runs/a': No space left on device.\n"),
    "interrupted": (
        KeyboardInterrupt(),
        130,
        "Interrupted; the same command goes on from what was",
    ),
    "a mistake": (
        UserError(Problem("a", "wrong."), Problem("b", "too.")),
        2,
        "error: a: wrong.\nerror: b: too.\n",
    ),
    "a disk": (OSError(errno.EIO, "Broken"), 2, "error: Broken.\n"),
    "closed pipe": (BrokenPipeError(), 141, ""),
    "kept": (PreemptedError("Stopped."), 85, "Stopped. The same command goes on from there."),
    "lost": (PreemptedError("Stopped.", False), 143, "Stopped. The same command begins anew."),
}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PreemptedError("Stopped."),
            "Stopped. The same command without overwrite=true goes on from there.\n",
        ),
        (
            KeyboardInterrupt(),
            "Interrupted; the same command without overwrite=true goes on from what was kept, "
            "if anything.\n",
        ),
    ],
)
def test_a_run_that_overwrote_another_is_resumed_without_overwriting(error, said, capsys):
    with pytest.raises(SystemExit), exit_codes(["name=a", "overwrite=true"]):
        raise error
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("kind", ENDS)
def test_what_is_no_mistake_of_the_program_has_no_traceback(kind, capsys):
    error, code, said = ENDS[kind]
    with pytest.raises(SystemExit) as stop, exit_codes():
        raise error
    assert stop.value.code == code
    assert said in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_gets_another(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with exit_codes():
        print("8×")
    assert stream.buffer.getvalue() == b"8?\n"


@pytest.mark.parametrize("error", [ConnectionError(1, "lost"), TimeoutError(1, "late")])
def test_ranks_that_lost_each_other_have_their_traceback(error):
    with pytest.raises(type(error)), exit_codes():
        raise error


def test_a_standard_error_that_is_gone_changes_no_exit_code(monkeypatch):
    class Gone(io.TextIOBase):
        def write(self, text):
            raise OSError(errno.EPIPE, "gone")

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(SystemExit) as stop, exit_codes():
        raise UserError.at("", "a")
    assert stop.value.code == 2


def test_what_was_said_before_a_mistake_is_still_said_where_it_can_be(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    stream.write("a table\n")
    with pytest.raises(SystemExit), exit_codes():
        raise OSError(errno.EIO, "Broken")
    assert stream.buffer.getvalue() == b"a table\n"


def test_a_mistake_of_the_program_has_its_traceback():
    with pytest.raises(OSError, match="of its own"), exit_codes():
        raise OSError("of its own")


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_s_summary_names_the_mistake_and_the_terminal_once(
    tmp_path, monkeypatch, capsys, rank
):
    """As torchrun itself reads what a worker leaves it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises(SystemExit) as stop, exit_codes():
        raise UserError(Problem("model.x", "unknown key."), Problem("seed", "expected a number."))
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("error: ") == (2 if rank == 0 else 0)
    failure = ProcessFailure(rank, pid=1, exitcode=2, error_file=str(path))
    assert abs(failure.timestamp - time.time()) < 60
    summary = str(ChildFailedError("trainer", {rank: failure}))
    assert "model.x: unknown key." in summary
    assert "seed: expected a number." in summary
    assert json.loads(path.read_text())["message"].keys() == {"message", "extraInfo"}
