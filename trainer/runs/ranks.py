"""Processes of a distributed run: this process's rank, and collective operations.

torchrun or srun starts the processes; a run of a single process needs neither.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from trainer.common.errors import DivergedError, PreemptedError, Problem, UserError, os_reason
from trainer.common.processes import core_numbers, usual_threads
from trainer.evaluation.store import Share
from trainer.runs.config import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process: ``rank`` of ``world_size``, and ``local_rank`` of ``local_size`` on its
    machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files, prints and makes decisions."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.world_size // self.local_size)


def current_ranks() -> Ranks:
    """Return this process's rank as set by torchrun or srun; rank 0 of 1 without either."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _translate_slurm()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Ranks(*(int(os.environ.get(name, default)) for name, default in defaults.items()))


def _translate_slurm() -> None:
    """Set torchrun's environment variables from srun's."""
    slurm = os.environ
    # "4(x2),3" means four tasks on each of two nodes, then three.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", slurm["SLURM_STEP_TASKS_PER_NODE"])
    per_node = [tasks for tasks, nodes in groups for _ in range(int(nodes or 1))]
    # "gpu[07-08,12],login1" begins with gpu07.
    hosts = re.sub(r"\[(\w+)[^\]]*\]", r"\1", slurm["SLURM_STEP_NODELIST"])
    os.environ |= {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": per_node[int(slurm["SLURM_NODEID"])],
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "MASTER_ADDR": hosts.split(",")[0],
        "MASTER_PORT": str(15_000 + int(slurm["SLURM_JOB_ID"]) % 10_000),
    }


def device_type(config: RunConfig) -> Literal["cuda", "cpu"]:
    """Return the device type of a run: GPUs if available and allowed, otherwise the CPU.

    Never Apple's GPUs, which have no float64.
    """
    gpu = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "cuda" if gpu else "cpu"


def device_of(config: RunConfig, ranks: Ranks) -> torch.device:
    """Return the device of this process.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if device_type(config) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device_index(ranks, torch.cuda.device_count()))


def device_index(ranks: Ranks, visible: int) -> int:
    """Return the index of this process's GPU among the visible ones.

    That is its local rank, or 0 if the launcher shows each process only its own GPU (``srun
    --gpus-per-task=1``).

    Raises:
        UserError: there are fewer GPUs than processes; transient, since a GPU may have failed.
    """
    if visible == 1:
        return 0
    if visible < ranks.local_size:
        raise UserError.at(
            "strategy",
            f"{ranks.local_size} processes were started on a machine where each sees {visible} "
            f"GPUs; start {visible}, or show every process its own (srun --gpus-per-task=1).",
            transient=True,
        )
    return ranks.local_rank


def init_distributed(config: RunConfig) -> Ranks:
    """Initialize the process group of a run if its strategy needs one.

    Raises:
        UserError: several processes were started for a run on a single device, or more processes
            than GPUs, or only some of them see a GPU.
    """
    ranks = current_ranks()
    if config.strategy.name == "single":
        if ranks.world_size > 1:
            raise UserError.at(
                "strategy",
                f"{ranks.world_size} processes were started, but strategy=single uses one; choose "
                "strategy=ddp, fsdp2 or hsdp.",
            )
        return ranks
    if not dist.is_initialized():
        device = device_of(config, ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if ranks.world_size > 1:
            start = timedelta(seconds=config.strategy.timeouts.start)
            dist.init_process_group(backend, timeout=start)
            wait = timedelta(seconds=config.strategy.timeouts.one_rank)
            _waiting.append(dist.new_group(backend="gloo", timeout=wait))
            check_same_device(device.type)
        else:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return ranks


def check_same_device(device: str) -> None:
    """Check that all ranks have a GPU, or none; all ranks call this together.

    ``device``: type of this rank's device, "cpu" or "cuda". A rank that falls back to the CPU
    would enter none of the others' collectives on GPUs.

    Raises:
        UserError: on all ranks, if some have no GPU; transient, since a driver may have failed.
    """
    devices = all_gather((device, os.uname().nodename))
    without = sorted({node for kind, node in devices if kind == "cpu"})
    if without and any(kind != "cpu" for kind, _ in devices):
        raise UserError.at(
            "trainer.accelerator",
            f"torch sees no GPU on {', '.join(without)}, but other processes have one; see what "
            "nvidia-smi says there, or leave such nodes out (slurm.exclude, sbatch --exclude).",
            transient=True,
        )


def join_evaluation(together: Callable[[], None] = lambda: None) -> tuple[Share, int]:
    """Return this process's share of an evaluation without a run, and the cores that it may use,
    where torchrun or srun started several. All of them call it together.

    ``together``: work that several processes share while they are in one group.

    Raises:
        UserError: there are fewer GPUs than processes, or only some processes see a GPU.
    """
    ranks = current_ranks()
    if ranks.world_size == 1:
        return Share(), usual_threads()
    if on_gpu := torch.cuda.is_available():
        torch.cuda.set_device(device_index(ranks, torch.cuda.device_count()))
    dist.init_process_group("gloo")
    check_same_device("cuda" if on_gpu else "cpu")
    share, threads = agreed_share(range(ranks.world_size), ranks), share_of_cores()
    together()
    dist.destroy_process_group()
    assert share is not None
    return share, threads


def agreed_share(able: Sequence[int], ranks: Ranks) -> Share | None:
    """Return this rank's share of an evaluation by the ranks ``able``, or None if it is not able.

    All ranks call it together and agree on the name of the attempt.
    """
    attempt = all_gather(uuid4().hex)[0]
    return Share(able.index(ranks.rank), len(able), attempt) if ranks.rank in able else None


_waiting: list[dist.ProcessGroup] = []
"""The group in which several ranks wait for the work of one; empty for a single rank."""


def waiting_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks with timeout ``strategy.timeouts.one_rank``, or None.

    It serves collectives that wait for the work of one rank. None stands for the default group, if
    there is only one rank.
    """
    return _waiting[0] if _waiting else None


def limit_collectives(seconds: float) -> None:
    """Set the timeout of collectives from now on; all ranks call this together."""
    if not _waiting:
        return
    dist.barrier(group=waiting_group())  # pending operations keep the old timeout
    on_devices = [g for g, backend in _world.pg_backend_config.items() if "nccl" in backend]
    # Torch has no public function for existing groups; torchtitan does the same. None: the default
    # group.
    for group in (None, *on_devices):
        _set_pg_timeout(timedelta(seconds=seconds), group)


class Vote:
    """Vote on whether any rank wants something, without a host sync.

    The result is known one step later on all ranks, so that communication overlaps with
    computation; immediately with a single rank.
    """

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._pending: tuple[torch.Tensor, Any] | None = None

    def agreed(self, mine: bool) -> bool:
        """Cast this step's vote and return the previous step's result; all ranks call this every
        step."""
        if self._alone:
            return mine
        agreed = False
        if self._pending is not None:
            votes, work = self._pending
            work.wait()
            agreed = bool(votes.item())
        votes = torch.tensor([float(mine)])
        self._pending = votes, dist.all_reduce(votes, group=waiting_group(), async_op=True)
        return agreed


def shutdown_distributed() -> None:
    """Destroy the process group, if there is one."""
    _waiting.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(config: RunConfig) -> Iterator[Ranks]:
    """Provide the process group of a run.

    The group is destroyed if the block ends normally, or stops or diverges on all ranks. Any other
    error may have occurred on one rank only, whose peers wait in a collective, and with NCCL
    destroying the group would wait for them. The error is therefore reported immediately, the group
    is kept, and the program exits without destroying it
    (:func:`trainer.commands.exit_codes.leaving_ranks`).

    Raises:
        UserError: as for :func:`init_distributed`.
    """
    ranks = init_distributed(config)
    try:
        yield ranks
    except (PreemptedError, DivergedError):
        shutdown_distributed()
        raise
    except BaseException as error:
        if ranks.world_size == 1:
            shutdown_distributed()
        elif not isinstance(error, UserError):  # UserErrors are reported separately
            traceback.print_exc()
        raise
    shutdown_distributed()


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on rank 0; broadcast its result or error to all ranks.

    A disk error on rank 0 is thus reported by all ranks, instead of a lost connection. The others
    wait up to ``strategy.timeouts.one_rank`` seconds. ``group``: a group of all ranks; another
    thread needs its own.

    Raises:
        UserError: on all ranks, if it was raised on rank 0; transient if OSError was.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[Any] = [_outcome(function) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, group=group or waiting_group())
    return _result(outcome[0])


def on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``function`` on every rank; return all results in the order of ranks.

    An error on any rank is raised on all, so that no rank waits in a collective for one that has
    left. ``group``: as for :func:`on_rank_zero`.

    Raises:
        UserError: on all ranks, the first one raised; transient if OSError was raised.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [function()]
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(function), group=group or waiting_group())
    return [_result(outcome) for outcome in outcomes]


_Outcome = tuple[Any, tuple[Problem, ...]]
"""What a function returned, or the problems of the error that it raised."""


def _outcome(function: Callable[[], Any]) -> _Outcome:
    try:
        return function(), ()
    except UserError as error:
        return None, error.problems
    except OSError as error:
        where = error.filename or f"process {dist.get_rank()}"
        return None, (Problem(where, f"{os_reason(error)}.", transient=True),)


def _result(outcome: _Outcome) -> Any:
    result, problems = outcome
    if problems:
        raise UserError(*problems)
    return result


def all_gather(value: T) -> list[T]:
    """Return the ``value`` of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=waiting_group())
    return values


def share_of_cores() -> int:
    """Return the number of cores for this process; all ranks call this together.

    A core that several processes of the machine may use is divided among them. A process with cores
    of its own from srun gets all of these; torchrun's processes, which share the cores, get equal
    parts.
    """
    mine, machine = core_numbers(), os.uname().nodename
    sets = all_gather((machine, mine))
    return fair_share(mine, [cores for where, cores in sets if where == machine])


def fair_share(mine: frozenset[int], of_all: Sequence[frozenset[int]]) -> int:
    """Return the sum over the cores ``mine`` of 1 / (number of sets in ``of_all`` with it), at
    least 1."""
    return max(int(sum(Fraction(1, sum(core in cores for cores in of_all)) for core in mine)), 1)
