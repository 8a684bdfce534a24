"""The processes of a distributed run: which one this is, and what they do together.

They are started from outside, by torchrun or by srun; a run of one process needs no starter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.errors import UserError
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


def init_distributed(config: RunConfig) -> Ranks:
    """Initialize the process group of a run, where its strategy needs one.

    Raises:
        UserError: several processes were started for a run on a single device.
    """
    ranks = current_ranks()
    if config.strategy.name == "single":
        if ranks.world_size > 1:
            raise UserError(
                f"strategy: {ranks.world_size} processes were started, but strategy=single uses "
                "one; choose strategy=ddp, fsdp2 or hsdp."
            )
        return ranks
    if not dist.is_initialized():
        gpu = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
        if gpu:
            torch.cuda.set_device(ranks.local_rank)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        if ranks.world_size > 1:
            dist.init_process_group(backend)
        else:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return ranks


def shutdown_distributed() -> None:
    """Destroy the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 alone and broadcast its result, or its error, to all: what a disk
    does to one rank is said by all, instead of a lost connection by the others.

    Raises:
        UserError: on all ranks, where it or OSError was raised on rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[tuple[T | None, tuple[str, ...]]] = [(None, ())]
    if dist.get_rank() == 0:
        try:
            outcome = [(function(), ())]
        except UserError as error:
            outcome = [(None, tuple(error.problems))]
        except OSError as error:
            where = error.filename or "the first process"
            outcome = [(None, (f"{where}: {error.strerror or error}.",))]
    dist.broadcast_object_list(outcome)
    result, problems = outcome[0]
    if problems:
        raise UserError(*problems)
    return result  # type: ignore[return-value]


def all_gather(value: T) -> list[T]:
    """The ``value`` of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]
