"""Ranks of a distributed run: this process's rank and device, its group, collective operations.

torchrun or srun starts the processes; a run of a single process needs neither.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.processes import cores

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


def device_type(accelerator: str = "auto") -> Literal["cuda", "cpu"]:
    """Return the device type of a run: GPUs if available and not excluded by ``accelerator=cpu``.

    Never Apple's GPUs, which have no float64.
    """
    return "cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu"


def best_precision(device: str) -> Literal["fp32", "bf16"]:
    """Return bf16 for a GPU that computes in it without emulation, fp32 for others and CPUs."""
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


def device_of(accelerator: str, ranks: Ranks) -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the only one that it sees
    (``srun --gpus-per-task=1``)."""
    if device_type(accelerator) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank if torch.cuda.device_count() > 1 else 0)


def init_distributed(strategy: str, accelerator: str = "auto") -> Ranks:
    """Initialize the process group that a strategy other than ``single`` needs.

    Raises:
        UserError: several processes were started for a run on a single device.
    """
    ranks = current_ranks()
    if strategy == "single":
        if ranks.world_size > 1:
            raise UserError(
                f"strategy: single uses one process, and {ranks.world_size} were started"
            )
        return ranks
    if not dist.is_initialized():
        device = device_of(accelerator, ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if ranks.world_size > 1:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        else:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return ranks


@contextmanager
def process_group(strategy: str, accelerator: str = "auto") -> Iterator[Ranks]:
    """Provide the process group of a run.

    The group is destroyed if the block ends normally, or stops or diverges on all ranks. Any other
    error may have occurred on one rank only, and with NCCL destroying the group would wait for its
    peers.
    """
    ranks = init_distributed(strategy, accelerator)
    try:
        yield ranks
    except BaseException as error:
        if ranks.world_size == 1 or isinstance(error, PreemptedError | DivergedError):
            shutdown_distributed()
        elif not isinstance(error, UserError):  # printed by the command line
            traceback.print_exc()
        raise
    shutdown_distributed()


def shutdown_distributed() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Vote:
    """Whether any rank wants something, without a host sync.

    The result is known one step later on all ranks, so that communication overlaps with
    computation; immediately with a single rank.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, Any] | None = None

    def agreed(self, mine: bool) -> bool:
        """Return the previous step's result; all ranks call this every step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return mine
        agreed = False
        if self._pending is not None:
            votes, work = self._pending
            work.wait()
            agreed = bool(votes.item())
        votes = torch.tensor([float(mine)])
        self._pending = votes, dist.all_reduce(votes, async_op=True)
        return agreed


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on rank 0; return its result, or raise its error, on all ranks.

    ``group``: a group of all ranks; another thread needs its own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def share_of_cores(ranks: Ranks) -> int:
    """Return the number of cores for this process.

    srun gives each process cores of its own. torchrun's processes share all cores of a machine.
    """
    if "SLURM_CPUS_PER_TASK" in os.environ and "SLURM_LOCALID" in os.environ:
        return cores()
    return max(cores() // ranks.local_size, 1)
