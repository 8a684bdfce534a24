"""Who am I, by torchrun, by srun, or alone; and what only the first does."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.program import run_ranks
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.processes import Ranks, current_ranks
from trainer.common.ranks import (
    all_gather,
    any_rank,
    best_precision,
    device_of,
    meeting_store,
    on_rank_zero,
    process_group,
    tf32,
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


def test_torchrun_says_who_it_is(environment):
    for name, value in zip(TORCHRUN, ["5", "16", "1", "4", "1"], strict=True):
        environment.setenv(name, value)
    assert current_ranks() == Ranks(5, 16, 1, 4)


def test_a_batch_script_without_srun_is_alone(environment):
    """SLURM tells the script itself of the tasks it may start; it is none of them."""
    assert current_ranks() == Ranks(0, 1, 0, 1)
    environment.setenv("SLURM_NTASKS", "8")
    environment.setenv("SLURM_PROCID", "0")
    assert current_ranks() == Ranks()


@pytest.mark.slow
def test_two_ranks_share_results_errors_and_wishes(tmp_path):
    """The first rank's result and error reach both, and so does what one of them wishes."""
    script = Path(__file__).with_name("two_ranks.py")
    done = run_ranks(2, script, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    for rank in done:
        assert rank.stdout.splitlines() == [
            "told: [None, 0]",
            "result: 3",
            "error: FileNotFoundError nowhere",
            "gathered: [0, 10]",
            "wishes: [False, True, True]",
        ]
    assert any_rank(False, True) == [False, True]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("gpu[07-08,12],login1", "gpu07"), ("a1,a2", "a1"), ("n[3,5]", "n3")],
)
def test_ranks_of_srun_meet_at_the_first_host_of_the_job(environment, nodes, first):
    step = {
        "PROCID": "5", "LOCALID": "1", "NODEID": "1", "STEP_NUM_TASKS": "8", "JOB_ID": "123456",
        "STEP_NUM_NODES": "2", "STEP_NODELIST": nodes,
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    assert current_ranks() == Ranks(5, 8, 1, 4)
    names = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "RANK", "WORLD_SIZE")
    assert [os.environ[name] for name in names] == [first, "18456", "1", "5", "8"]


def test_ranks_of_srun_meet_where_the_user_says(environment):
    step = {
        "PROCID": "5", "LOCALID": "1", "NODEID": "1", "STEP_NUM_TASKS": "8", "JOB_ID": "123456",
        "STEP_NUM_NODES": "2", "STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    environment.setenv("MASTER_ADDR", "10.0.0.7")
    assert current_ranks() == Ranks(5, 8, 1, 4)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.7", "18456")


def test_a_step_of_one_task_and_what_torchrun_says_are_not_srun_s(environment):
    environment.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert current_ranks() == Ranks()
    environment.setenv("SLURM_STEP_NUM_TASKS", "8")  # torchrun within srun
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "4")
    assert current_ranks() == Ranks(3, 4, 0, 1)
    assert "MASTER_ADDR" not in os.environ


@pytest.mark.parametrize(("tasks", "is_refused"), [("4(x2)", False), ("2,1", True)])
def test_nodes_of_srun_have_equal_numbers_of_tasks(environment, tasks, is_refused):
    step = {
        "PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_NUM_TASKS": "8", "JOB_ID": "1",
        "STEP_NUM_NODES": "2", "STEP_NODELIST": "a[1-2]", "STEP_TASKS_PER_NODE": tasks,
    }  # fmt: skip
    for name, value in step.items():
        environment.setenv(f"SLURM_{name}", value)
    if is_refused:
        with pytest.raises(UserError, match="got 2,1"):
            current_ranks()
    else:
        assert current_ranks() == Ranks(0, 8, 0, 4)


def test_a_rank_that_finds_no_rank_0_names_the_place(environment):
    for name, value in zip(TORCHRUN, ["1", "2", "1", "2", "0"], strict=True):
        environment.setenv(name, value)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", str(port))
    environment.setattr("trainer.common.ranks.START", 0.1)
    with pytest.raises(UserError, match=f"no answer of rank 0 at 127.0.0.1:{port}"):
        meeting_store.__wrapped__()


def test_rank_0_names_a_port_that_is_taken(environment):
    for name, value in zip(TORCHRUN, ["0", "2", "0", "2", "0"], strict=True):
        environment.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            meeting_store.__wrapped__()


def test_a_process_computes_where_it_may(environment, monkeypatch):
    environment.setenv("LOCAL_RANK", "1")
    for has_gpu, accelerator, device in (
        (False, "auto", torch.device("cpu")),
        (True, "cpu", torch.device("cpu")),
        (True, "auto", torch.device("cuda", 1)),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert device_of(accelerator) == device
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert device_of("auto") == torch.device("cuda", 0)


def test_a_gpu_that_emulates_bf16_computes_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated)
    assert best_precision("cuda") == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: True)
    assert (best_precision("cuda"), best_precision("cpu")) == ("bf16", "fp32")


def test_a_gpu_multiplies_in_tf32_within_a_block_alone():
    before = torch.get_float32_matmul_precision()
    for device, within in (("cuda", "high"), ("cpu", before)):
        with tf32(device):
            assert torch.get_float32_matmul_precision() == within
        assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def no_group(environment):
    """No process group, before and afterwards."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [None, STOP, UserError("no"), RuntimeError("x"), KeyboardInterrupt()],
)
def test_one_process_of_a_strategy_for_several_has_a_group_within_the_block(no_group, error):
    with suppress(type(error) if error else ()), process_group("ddp"):
        assert current_ranks() == Ranks()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
        assert [os.environ[name] for name in names] == ["0", "1", "0", "0"]
        assert on_rank_zero(lambda: 3) == 3
        assert all_gather(5) == [5]
        if error:
            raise error
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (None, False),
        (STOP, False),
        (DivergedError("no"), False),
        (UserError("no"), True),
        (RuntimeError("x"), True),
    ],
)
def test_of_several_the_group_stays_where_one_may_have_failed_alone(
    no_group, monkeypatch, error, stays
):
    for name, value in zip(TORCHRUN, ["0", "2", "0", "2", "0"], strict=True):
        monkeypatch.setenv(name, value)
    start, store = dist.init_process_group, dist.HashStore()
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: start("gloo", store=store, rank=0, world_size=1),
    )
    monkeypatch.setattr("trainer.common.ranks.meeting_store", lambda: store)
    with suppress(type(error) if error else ()), process_group("ddp"):
        if error:
            raise error
    assert dist.is_initialized() == stays
