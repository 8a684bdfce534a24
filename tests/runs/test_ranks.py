"""Who am I, by torchrun, by srun, or alone; and what only the first does."""

from __future__ import annotations

import os

import pytest

from trainer.errors import UserError
from trainer.runs.ranks import Ranks, current_ranks, on_rank_zero

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.fixture
def environment(monkeypatch):
    """The process's environment without any launcher's names, put back afterwards."""
    for name in [*os.environ]:
        if name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT") or name.startswith("SLURM"):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def test_a_process_that_nobody_launched_is_alone(environment):
    assert current_ranks() == Ranks(0, 1, 0, 1)
    assert current_ranks().is_rank_zero


def test_torchrun_says_who_it_is(environment):
    for name, value in zip(TORCHRUN, ["5", "16", "1", "4", "1"], strict=True):
        environment.setenv(name, value)
    ranks = current_ranks()
    assert ranks == Ranks(5, 16, 1, 4)
    assert ranks.nodes == 4
    assert not ranks.is_rank_zero


def test_srun_says_who_it_is(environment):
    step = {
        "PROCID": "5", "LOCALID": "1", "NODEID": "1", "STEP_NUM_TASKS": "8", "JOB_ID": "123456",
        "STEP_TASKS_PER_NODE": "4(x2)", "STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    assert current_ranks() == Ranks(5, 8, 1, 4)
    assert os.environ["MASTER_ADDR"] == "gpu07"
    assert os.environ["MASTER_PORT"] == "18456"


def test_a_batch_script_without_srun_is_alone(environment):
    """SLURM tells the script itself of the tasks it may start; it is none of them."""
    environment.setenv("SLURM_NTASKS", "8")
    environment.setenv("SLURM_PROCID", "0")
    assert current_ranks() == Ranks()


def test_alone_the_first_does_everything():
    assert on_rank_zero(lambda: 3) == 3
    with pytest.raises(UserError, match="no"):
        on_rank_zero(lambda: (_ for _ in ()).throw(UserError("no")))
