"""Who am I, by torchrun, by srun, or alone; and what only the first does."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.program import run_ranks
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.runs import ranks as ranks_module
from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import (
    Ranks,
    Vote,
    all_gather,
    current_ranks,
    device_index,
    device_of,
    device_type,
    fair_share,
    init_distributed,
    limit_collectives,
    on_all_ranks,
    on_rank_zero,
    process_group,
    share_of_cores,
    shutdown_distributed,
    waiting_group,
)
from trainer.runs.training_config import TimeoutConfig

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


def test_alone_the_first_does_everything():
    assert on_rank_zero(lambda: 3) == 3
    with pytest.raises(UserError, match="no"):
        on_rank_zero(lambda: (_ for _ in ()).throw(UserError.at("", "no")))


@pytest.mark.parametrize(
    ("visible", "index"),
    [
        (4, 3),  # torchrun shows every process all GPUs of its machine
        (8, 3),
        (1, 0),  # srun --gpus-per-task=1 shows each its own
    ],
)
def test_a_process_takes_the_gpu_that_is_its_own_among_those_it_sees(visible, index):
    assert device_index(Ranks(7, 8, 3, 4), visible) == index


def test_more_processes_than_gpus_are_refused_by_each():
    for local_rank in range(4):
        with pytest.raises(UserError, match=r"4 processes .* sees 2 GPUs") as error:
            device_index(Ranks(local_rank, 4, local_rank, 4), 2)
        assert error.value.is_transient  # a GPU may have failed since the job was submitted


@pytest.mark.parametrize(
    ("of_all", "share"),
    [
        (["01234567"], 8),
        (["01234567", "01234567"], 4),  # torchrun: both may use all
        (["0123", "4567"], 4),  # srun: each has its own
        (["012345", "012345", "012345"], 2),
        (["0", "0", "0"], 1),
    ],
)
def test_a_core_that_several_processes_may_use_is_divided_among_them(of_all, share):
    sets = [frozenset(map(int, cores)) for cores in of_all]
    assert [fair_share(mine, sets) for mine in sets] == [share] * len(sets)


def test_an_error_of_one_rank_is_said_and_ends_it_without_waiting_for_the_others(tmp_path):
    """The first rank, in a collective, learns of it by the connection that the second closes."""
    script = Path(__file__).with_name("failing_ranks.py")
    first, second = run_ranks(2, script, cwd=tmp_path)
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stdout == second.stdout == ""
    assert second.stderr.endswith("RuntimeError: CUDA out of memory\n")
    assert second.stderr.count("Traceback") == 1


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory):
    """What each of two ranks says in ``waiting_ranks.py``, by its subject."""
    script = Path(__file__).with_name("waiting_ranks.py")
    done = run_ranks(2, script, cwd=tmp_path_factory.mktemp("run"))
    assert [rank.returncode for rank in done] == [0, 0], done
    return [dict(line.split(": ", 1) for line in rank.stdout.splitlines()) for rank in done]


def test_ranks_wait_longer_for_the_work_of_one_than_in_a_collective(said_by_two):
    assert [outcome["alone"] for outcome in said_by_two] == ["done", "done"]
    assert [outcome["collective"] for outcome in said_by_two] == ["late", "gave up"]


def test_what_a_disk_does_to_the_first_is_said_by_all(said_by_two):
    assert [outcome["disk"] for outcome in said_by_two] == [
        "nowhere: No such file or directory."
    ] * 2


def test_a_node_that_sees_no_gpu_is_named_by_all(said_by_two):
    message = (
        f"trainer.accelerator: torch sees no GPU on {os.uname().nodename}, but other processes"
    )
    assert all(of_rank["device"].startswith(message) for of_rank in said_by_two)


def test_one_rank_draws_the_id_of_the_dashboard(said_by_two):
    first, second = (outcome["dashboard"] for outcome in said_by_two)
    assert first == second == Path(said_by_two[0]["file"]).read_text()


def test_ranks_of_a_machine_share_its_cores(said_by_two):
    assert [int(outcome["threads"]) for outcome in said_by_two] == [
        max(len(os.sched_getaffinity(0)) // 2, 1)
    ] * 2


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


@pytest.mark.parametrize(("size", "local", "nodes"), [(1, 1, 1), (9, 4, 3), (8, 4, 2)])
def test_machines_that_are_not_full_count(size, local, nodes):
    assert Ranks(0, size, 0, local).nodes == nodes


def test_a_process_computes_where_it_may(monkeypatch):
    everywhere, cpu = RunConfig(), RunConfig(trainer=TrainerConfig(accelerator="cpu"))
    ranks = Ranks(1, 2, 1, 2)
    for has_gpu, config, device in (
        (False, everywhere, torch.device("cpu")),
        (True, cpu, torch.device("cpu")),
        (True, everywhere, torch.device("cuda", 1)),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert device_of(config, ranks) == device
        assert device_type(config) == device.type


def test_a_run_of_one_device_is_no_run_of_several_processes(environment):
    assert init_distributed(RunConfig()) == Ranks()
    for name, value in zip(TORCHRUN, ["0", "2", "0", "2", "0"], strict=True):
        environment.setenv(name, value)
    with pytest.raises(UserError) as error:
        init_distributed(RunConfig())
    assert tuple(map(str, error.value.problems)) == (
        "strategy: 2 processes were started, but strategy=single uses one; choose strategy=ddp, "
        "fsdp2 or hsdp.",
    )


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_ranks_meet_on_their_devices_and_wait_for_each_other_on_the_cpu(environment, device):
    for name, value in zip(TORCHRUN, ["1", "2", "1", "2", "0"], strict=True):
        environment.setenv(name, value)
    asked = []
    environment.setattr(dist, "init_process_group", lambda *a, **more: asked.append((a, more)))
    environment.setattr(dist, "new_group", lambda **options: asked.append(options))
    environment.setattr(torch.cuda, "set_device", asked.append)
    environment.setattr(ranks_module, "device_of", lambda *_: torch.device(device))
    environment.setattr(ranks_module, "_waiting", [])
    timeouts = TimeoutConfig(start=7, one_rank=9)
    config = RunConfig(strategy=StrategyConfig("ddp", timeouts=timeouts))
    ranks = init_distributed(config)
    assert (ranks.rank, ranks.world_size) == (1, 2)
    on_gpu = device == "cuda:1"
    assert asked == [
        *[torch.device(device)] * on_gpu,
        (("cpu:gloo,cuda:nccl" if on_gpu else "gloo",), {"timeout": timedelta(seconds=7)}),
        {"backend": "gloo", "timeout": timedelta(seconds=9)},
    ]


def test_ranks_of_the_next_run_wait_in_its_own_group(environment):
    for name, value in zip(TORCHRUN, ["0", "2", "0", "2", "0"], strict=True):
        environment.setenv(name, value)
    environment.setattr(dist, "init_process_group", lambda *_, **__: None)
    for group in ("of the first run", "of the second"):
        environment.setattr(dist, "new_group", lambda group=group, **_: group)
        init_distributed(RunConfig(strategy=StrategyConfig("ddp")))
        assert waiting_group() == group
        shutdown_distributed()
    assert waiting_group() is None


@pytest.fixture
def alone(environment):
    """A process group of this process; none is left behind."""
    assert not dist.is_initialized()
    yield RunConfig(strategy=StrategyConfig("ddp"))
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_of_a_strategy_for_several_has_a_group_of_its_own(alone):
    assert init_distributed(alone) == Ranks()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")] == [
        "0", "1", "0", "0",
    ]  # fmt: skip
    assert waiting_group() is None
    group = dist.group.WORLD
    assert init_distributed(alone) == Ranks()  # again
    assert dist.group.WORLD is group
    limit_collectives(0.1)  # of nobody
    assert on_rank_zero(lambda: 3) == 3
    assert on_all_ranks(lambda: 4) == [4]
    assert all_gather(5) == [5]
    shutdown_distributed()
    assert not dist.is_initialized()
    shutdown_distributed()


@pytest.mark.parametrize(
    "error",
    [None, PreemptedError("stop"), UserError.at("", "no"), RuntimeError("x"), KeyboardInterrupt()],
)
def test_the_group_of_one_process_ends_with_its_block_however_that_ends(alone, error, capsys):
    kinds = type(error) if error else ()
    with suppress(kinds), process_group(alone) as ranks:
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
        (PreemptedError("stop"), False, False),
        (DivergedError.at("", "no"), False, False),
        (UserError.at("", "no"), True, False),
        (RuntimeError("x"), True, True),
    ],
)
def test_of_several_the_group_stays_where_one_may_have_failed_alone(
    alone, monkeypatch, error, stays, printed, capsys
):
    monkeypatch.setattr(ranks_module, "init_distributed", lambda config: Ranks(1, 2))
    init_distributed(alone)
    kinds = type(error) if error else ()
    with suppress(kinds), process_group(alone):
        if error:
            raise error
    assert dist.is_initialized() == stays
    assert ("RuntimeError: x" in capsys.readouterr().err) == printed


def test_cores_of_which_some_are_shared_are_divided():
    assert fair_share(frozenset({1, 2, 3}), [frozenset({1, 2, 3}), frozenset({3})]) == 2
    assert share_of_cores() == len(os.sched_getaffinity(0))


@pytest.fixture
def others(monkeypatch):
    """Votes of another rank, added to one's own once they are waited for."""
    cast = []

    def all_reduce(mine, group, async_op):
        assert async_op
        assert group == "waiting"
        vote = cast.pop(0)
        return SimpleNamespace(wait=lambda: mine.add_(vote))

    monkeypatch.setattr(ranks_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks_module.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks_module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(ranks_module, "waiting_group", lambda: "waiting")
    return cast


def test_a_vote_is_known_one_step_later_on_all_ranks(others):
    others[:] = [0, 1, 0, 1, 0]
    vote = Vote()
    assert [vote.agreed(mine) for mine in (False, False, True, True, False)] == [
        *(False, False, True, True, True),
    ]


@pytest.mark.parametrize(("there", "size"), [(False, 2), (True, 1)])
def test_alone_it_is_known_at_once(monkeypatch, there, size):
    monkeypatch.setattr(ranks_module.dist, "is_initialized", lambda: there)
    monkeypatch.setattr(ranks_module.dist, "get_world_size", lambda: size)
    vote = Vote()
    assert [vote.agreed(mine) for mine in (False, True, False)] == [False, True, False]
