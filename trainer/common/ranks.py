"""Ranks of a distributed run: the device of this process, its group, collective operations."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.processes import current_ranks
from trainer.common.watch import START

T = TypeVar("T")


def device_type(accelerator: str = "auto") -> Literal["cuda", "cpu"]:
    """Return the device type of a run: GPUs if available and not excluded by ``accelerator=cpu``.

    Never Apple's GPUs, which have no float64.
    """
    return "cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu"


def best_precision(device: str) -> Literal["fp32", "bf16"]:
    """Return bf16 for a GPU that computes in it without emulation, fp32 for others and CPUs."""
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


@contextmanager
def tf32(device: str) -> Iterator[None]:
    """Multiply float32 matrices in TF32 within the block, on a GPU."""
    if device != "cuda":
        yield
        return
    # torch recommends torch.backends.cuda.matmul.fp32_precision. Lightning reads the older
    # setting, and torch raises if both are used.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_of(accelerator: str) -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the only one that it sees
    (``srun --gpus-per-task=1``)."""
    if device_type(accelerator) == "cpu":
        return torch.device("cpu")
    number = current_ranks().local_rank if torch.cuda.device_count() > 1 else 0
    return torch.device("cuda", number)


def shared_value(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0, and return its result, plain values as JSON, on all ranks.

    Needs no process group and has no time limit: rank 0 may read a text for an hour. If it fails,
    all ranks end (`trainer.common.watch`).
    """
    ranks = current_ranks()
    if ranks.world_size == 1:
        return json.loads(json.dumps(function()))
    key = f"value {next(MEETINGS)}"
    store = meeting_store()
    if ranks.rank == 0:
        store.set(key, json.dumps(function()))
    while not store.check([key]):
        time.sleep(0.1)  # signals interrupt it, unlike a wait of the store
    return json.loads(store.get(key))


MEETINGS = count()
"""Numbers of the values and groups that all ranks have shared."""


@cache
def meeting_store() -> dist.Store:
    """Return the store in which the ranks of this command meet; raise a UserError if rank 0 does
    not start in time.

    Rank 0 serves it at MASTER_ADDR, or torchrun's agent, where a restart finds the keys of the
    attempt before it.
    """
    ranks = current_ranks()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=ranks.rank == 0 and not is_served,
            timeout=timedelta(seconds=START),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        fault = "no answer of rank 0" if ranks.rank else "rank 0 cannot listen"
        raise UserError(f"ranks: {fault} at {host}:{port} ({error})") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)


@contextmanager
def process_group(strategy: str, accelerator: str = "auto") -> Iterator[None]:
    """Provide the process group that a strategy other than ``single`` needs.

    The group is destroyed if the block ends normally, or stops or diverges on all ranks. Any other
    error may have occurred on one rank only, and with NCCL destroying the group would wait for its
    peers.
    """
    ranks = current_ranks()
    if strategy == "single":
        yield
        return
    device = device_of(accelerator)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: dist.Store = dist.HashStore()
    if ranks.world_size > 1:
        store = dist.PrefixStore(f"group {next(MEETINGS)}", meeting_store())
    else:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    limit = timedelta(minutes=30)
    dist.init_process_group(
        backend, timeout=limit, store=store, rank=ranks.rank, world_size=ranks.world_size
    )
    try:
        yield
    except BaseException as error:
        if ranks.world_size == 1 or isinstance(error, PreemptedError | DivergedError):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether any rank has set it; all ranks call this together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [*flags]
    counts = torch.tensor(flags, dtype=torch.int32)  # on the CPU: without a host sync
    dist.all_reduce(counts)
    return counts.bool().tolist()


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
