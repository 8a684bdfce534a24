"""The processes of a distributed run: which one this is, and what they do together.

They are started from outside, by torchrun or by srun; a run of one process needs no starter.
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

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from trainer.common.errors import PreemptedError, Problem, UserError
from trainer.cores import core_numbers
from trainer.runs.config import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among all: ``rank`` of ``world_size``, ``local_rank`` of ``local_size`` on its
    machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes files, prints and takes decisions."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.world_size // self.local_size)


def current_ranks() -> Ranks:
    """This process as torchrun or srun started it; rank 0 of 1 without either."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _translate_slurm()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Ranks(*(int(os.environ.get(name, default)) for name, default in defaults.items()))


def _translate_slurm() -> None:
    """Set the environment variables of torchrun from those that srun sets."""
    slurm = os.environ
    # "4(x2),3" is four tasks on each of two nodes, then three.
    per_node = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])
    assert per_node is not None
    os.environ |= {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": per_node[0],
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "MASTER_ADDR": _first_host(slurm["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(15_000 + int(slurm["SLURM_JOB_ID"]) % 10_000),
    }


def _first_host(nodes: str) -> str:
    """``gpu07`` out of SLURM's ``gpu[07-08,12],login1``."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def device_type(config: RunConfig) -> Literal["cuda", "cpu"]:
    """Where the run computes: on GPUs where torch sees them, unless it may not, else on the CPU.

    Never on Apple's, which have no float64.
    """
    gpu = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "cuda" if gpu else "cpu"


def device_of(config: RunConfig, ranks: Ranks) -> torch.device:
    """Where this process computes.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if device_type(config) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device_index(ranks, torch.cuda.device_count()))


def device_index(ranks: Ranks, visible: int) -> int:
    """The GPU of this process among those it sees: by its local rank, or, where the launcher shows
    every process its own alone (``srun --gpus-per-task=1``), the only one.

    Raises:
        UserError: there are fewer than processes.
    """
    if visible == 1:
        return 0
    if visible < ranks.local_size:
        raise UserError.at(
            "strategy",
            f"{ranks.local_size} processes were started on a machine where each sees {visible} "
            f"GPUs; start {visible}, or show every process its own (srun --gpus-per-task=1).",
        )
    return ranks.local_rank


def init_distributed(config: RunConfig) -> Ranks:
    """Initialize the process group of a run, where its strategy needs one.

    Raises:
        UserError: several processes were started for a run on a single device, or more than there
            are GPUs.
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
        else:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return ranks


_waiting: list[dist.ProcessGroup] = []
"""The group in which ranks wait for what one of them does alone, where there are several ranks."""


def waiting_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks with the limit ``strategy.timeouts.one_rank``, for whatever waits
    for a rank rather than for a device; None: the default group, of one rank."""
    return _waiting[0] if _waiting else None


def limit_collectives(seconds: float) -> None:
    """Let a rank wait at most so long for the others in a collective, from now on; all ranks call
    this together, and none goes on before all have come."""
    if not _waiting:
        return
    dist.barrier(group=waiting_group())  # what the slowest of them still does has the old limit
    on_devices = [g for g, backend in _world.pg_backend_config.items() if "nccl" in backend]
    # As in torchtitan; torch has no public way for groups that exist. None: the default group.
    for group in (None, *on_devices):
        _set_pg_timeout(timedelta(seconds=seconds), group)


def shutdown_distributed() -> None:
    """Destroy the process group, where there is one."""
    _waiting.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(config: RunConfig) -> Iterator[Ranks]:
    """The process group of a run, for what all its ranks do together.

    It is destroyed where that ends well, or is stopped on all ranks. Any other error may be that of
    one rank, whose peers sit in a collective: NCCL would wait for them before anyone knows why. So
    the error is said at once and the group stays, and the program ends without it
    (:func:`trainer.commands.exit_codes.leaving_ranks`).

    Raises:
        UserError: as :func:`init_distributed`.
    """
    ranks = init_distributed(config)
    try:
        yield ranks
    except PreemptedError:
        shutdown_distributed()
        raise
    except BaseException as error:
        if ranks.world_size == 1:
            shutdown_distributed()
        elif not isinstance(error, UserError):  # that is said in a line of its own
            traceback.print_exc()
        raise
    shutdown_distributed()


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on rank 0 alone and broadcast its result, or its error, to all: what a disk
    does to one rank is said by all, instead of a lost connection by the others. These wait up to
    ``strategy.timeouts.one_rank`` seconds. ``group``: of all ranks; of another thread its own.

    Raises:
        UserError: on all ranks, where it was raised on rank 0; a transient one where OSError was.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[Any] = [_outcome(function) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, group=group or waiting_group())
    return _result(outcome[0])


def on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``function`` on every rank; the results of all, in the order of ranks. An error of any
    is raised on all, so that none waits in the next collective for one that has left. ``group``: as
    of :func:`on_rank_zero`.

    Raises:
        UserError: on all ranks, the first that was raised; a transient one where OSError was.
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
        return None, (Problem(where, f"{error.strerror or error}.", transient=True),)


def _result(outcome: _Outcome) -> Any:
    result, problems = outcome
    if problems:
        raise UserError(*problems)
    return result


def all_gather(value: T) -> list[T]:
    """The ``value`` of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=waiting_group())
    return found


def share_of_cores() -> int:
    """Cores for this process: one that several processes of its machine may use is divided among
    these. So a process that srun gave cores of its own has all of them, and those of a torchrun,
    which may use the same ones, a part each. All ranks call it together."""
    mine, machine = core_numbers(), os.uname().nodename
    found = all_gather((machine, mine))
    return fair_share(mine, [cores for where, cores in found if where == machine])


def fair_share(mine: frozenset[int], of_all: Sequence[frozenset[int]]) -> int:
    """At least one: the cores ``mine``, each divided by how many of the sets ``of_all`` hold it."""
    return max(int(sum(Fraction(1, sum(core in cores for cores in of_all)) for core in mine)), 1)
