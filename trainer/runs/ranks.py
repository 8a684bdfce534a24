"""Devices and process group of a run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.processes import usual_threads
from trainer.common.ranks import (
    Ranks,
    current_ranks,
    shutdown_distributed,
)
from trainer.config import RunConfig


def device_type(config: RunConfig) -> Literal["cuda", "cpu"]:
    """Return the device type of a run: GPUs if available and allowed, otherwise the CPU.

    Never Apple's GPUs, which have no float64.
    """
    gpu = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "cuda" if gpu else "cpu"


def device_of(config: RunConfig, ranks: Ranks) -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the only one that it sees
    (``srun --gpus-per-task=1``)."""
    if device_type(config) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank if torch.cuda.device_count() > 1 else 0)


def init_distributed(config: RunConfig) -> Ranks:
    """Initialize the process group of a run if its strategy needs one.

    Raises:
        UserError: several processes were started for a run on a single device.
    """
    ranks = current_ranks()
    if config.strategy.name == "single":
        if ranks.world_size > 1:
            raise UserError(
                f"strategy: single uses one process, and {ranks.world_size} were started"
            )
        return ranks
    if not dist.is_initialized():
        device = device_of(config, ranks)
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
def process_group(config: RunConfig) -> Iterator[Ranks]:
    """Provide the process group of a run.

    The group is destroyed if the block ends normally, or stops or diverges on all ranks. Any other
    error may have occurred on one rank only, and with NCCL destroying the group would wait for its
    peers: the program exits without destroying it
    (:func:`trainer.__main__.leaving_ranks`).
    """
    ranks = init_distributed(config)
    try:
        yield ranks
    except BaseException as error:
        if ranks.world_size == 1 or isinstance(error, PreemptedError | DivergedError):
            shutdown_distributed()
        elif not isinstance(error, UserError):  # printed by the command line
            traceback.print_exc()
        raise
    shutdown_distributed()


def join_evaluation() -> tuple[Ranks, int]:
    """Return this process's rank in an evaluation without a run, and its number of threads."""
    ranks = current_ranks()
    if torch.cuda.is_available():
        torch.cuda.set_device(device_of(RunConfig(), ranks))
    return ranks, max(1, usual_threads() // ranks.local_size)
