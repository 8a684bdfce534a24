"""Who am I, by torchrun, by srun, or alone; and what only the first does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.program import run_ranks
from trainer.common import ranks as ranks_module
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.ranks import (
    Ranks,
    Vote,
    all_gather,
    current_ranks,
    device_of,
    init_distributed,
    on_rank_zero,
    process_group,
    shutdown_distributed,
)

STOP = PreemptedError("stop", "SIGTERM")
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


def test_a_batch_script_without_srun_is_alone(environment):
    """SLURM tells the script itself of the tasks it may start; it is none of them."""
    environment.setenv("SLURM_NTASKS", "8")
    environment.setenv("SLURM_PROCID", "0")
    assert current_ranks() == Ranks()


@pytest.mark.slow
def test_two_ranks_share_results_errors_and_votes(tmp_path):
    """The first rank's result and error reach both; a vote is known to both a step later."""
    script = Path(__file__).with_name("two_ranks.py")
    done = run_ranks(2, script, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    for rank in done:
        assert rank.stdout.splitlines() == [
            "result: 3",
            "error: FileNotFoundError nowhere",
            "gathered: [0, 10]",
            "votes: [False, False, True, False]",
        ]
    single = Vote()
    assert [single.agreed(mine) for mine in (False, True, False)] == [False, True, False]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("gpu[07-08,12],login1", "gpu07"), ("a1,a2", "a1"), ("n[3,5]", "n3")],
)
def test_ranks_of_srun_meet_at_the_first_host_of_the_job(environment, nodes, first):
    step = {
        "PROCID": "5", "LOCALID": "1", "NODEID": "1", "STEP_NUM_TASKS": "8", "JOB_ID": "123456",
        "STEP_TASKS_PER_NODE": "4(x2)", "STEP_NODELIST": nodes,
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    assert current_ranks() == Ranks(5, 8, 1, 4)
    names = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "RANK", "WORLD_SIZE")
    assert [os.environ[name] for name in names] == [first, "18456", "1", "5", "8"]


@pytest.mark.parametrize(
    ("per_node", "sizes"), [("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4]), ("3,2", [3, 2])]
)
def test_ranks_of_srun_count_those_of_their_own_node(environment, per_node, sizes):
    step = {
        "PROCID": "0", "LOCALID": "0", "STEP_NUM_TASKS": str(sum(sizes)), "JOB_ID": "7",
        "STEP_TASKS_PER_NODE": per_node, "STEP_NODELIST": "a1",
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    counts = []
    for node in range(len(sizes)):
        environment.setenv("SLURM_NODEID", str(node))
        environment.delenv("RANK", raising=False)
        counts.append(current_ranks().local_size)
    assert counts == sizes


def test_a_step_of_one_task_and_what_torchrun_says_are_not_srun_s(environment):
    environment.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert current_ranks() == Ranks()
    environment.setenv("SLURM_STEP_NUM_TASKS", "8")  # torchrun within srun
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "4")
    assert current_ranks() == Ranks(3, 4, 0, 1)
    assert "MASTER_ADDR" not in os.environ


def test_a_process_computes_where_it_may(monkeypatch):
    ranks = Ranks(1, 2, 1, 2)
    for has_gpu, accelerator, device in (
        (False, "auto", torch.device("cpu")),
        (True, "cpu", torch.device("cpu")),
        (True, "auto", torch.device("cuda", 1)),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert device_of(accelerator, ranks) == device


def test_a_run_of_one_device_is_no_run_of_several_processes(environment):
    assert init_distributed("single") == Ranks()
    for name, value in zip(TORCHRUN, ["0", "2", "0", "2", "0"], strict=True):
        environment.setenv(name, value)
    with pytest.raises(UserError) as error:
        init_distributed("single")
    assert str(error.value) == "strategy: single uses one process, and 2 were started"


@pytest.fixture
def alone(environment):
    """A process group of this process; none is left behind."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_of_a_strategy_for_several_has_a_group_of_its_own(alone):
    assert init_distributed("ddp") == Ranks()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")] == [
        "0", "1", "0", "0",
    ]  # fmt: skip
    group = dist.group.WORLD
    assert init_distributed("ddp") == Ranks()  # again
    assert dist.group.WORLD is group
    assert on_rank_zero(lambda: 3) == 3
    assert all_gather(5) == [5]
    shutdown_distributed()
    assert not dist.is_initialized()
    shutdown_distributed()


@pytest.mark.parametrize(
    "error",
    [None, STOP, UserError("no"), RuntimeError("x"), KeyboardInterrupt()],
)
def test_the_group_of_one_process_ends_with_its_block_however_that_ends(alone, error, capsys):
    kinds = type(error) if error else ()
    with suppress(kinds), process_group("ddp") as ranks:
        assert ranks == Ranks()
        assert dist.is_initialized()
        if error:
            raise error
    assert not dist.is_initialized()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "stays", "printed"),
    [
        (None, False, False),
        (STOP, False, False),
        (DivergedError("no"), False, False),
        (UserError("no"), True, False),
        (RuntimeError("x"), True, True),
    ],
)
def test_of_several_the_group_stays_where_one_may_have_failed_alone(
    alone, monkeypatch, error, stays, printed, capsys
):
    monkeypatch.setattr(ranks_module, "init_distributed", lambda *_: Ranks(1, 2))
    init_distributed("ddp")
    kinds = type(error) if error else ()
    with suppress(kinds), process_group("ddp"):
        if error:
            raise error
    assert dist.is_initialized() == stays
    assert ("RuntimeError: x" in capsys.readouterr().err) == printed
