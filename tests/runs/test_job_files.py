"""What the batch script is told by files."""

from __future__ import annotations

import json
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainer.commands.exit_codes import exit_codes
from trainer.common.errors import Problem, UserError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError.at("", "something"), True),
        (UserError.at("", "something", transient=True), False),
        (RuntimeError("something"), False),
    ],
)
def test_only_a_mistake_of_the_users_is_not_to_be_tried_again(tmp_path, monkeypatch, error, said):
    """A disk, a GPU or another process may do better the next time."""
    monkeypatch.setenv("UNROPE_MISTAKE_FILE", str(tmp_path / "mistake"))
    with pytest.raises((SystemExit, RuntimeError)), exit_codes():
        raise error
    assert (tmp_path / "mistake").exists() == said


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
