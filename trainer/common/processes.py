"""This process: its rank, its CPU cores, signals that end it, and the requeue of its SLURM job."""

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType

from trainer.common.errors import ANNOUNCED, PreemptedError, UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, from malloc.h."""
KEPT_MEMORY = 1 << 28
"""Bytes of the largest freed block that is kept, and of free memory at the end of the heap."""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process: ``rank`` of ``world_size``, and ``local_rank`` of ``local_size`` on its
    machine. The process of rank 0 writes files, prints and makes decisions."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def current_ranks() -> Ranks:
    """Return this process's rank as set by torchrun or srun; rank 0 of 1 without either.

    Under srun, set torchrun's environment variables too, which the libraries read.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _translate_slurm()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Ranks(*(int(os.environ.get(name, default)) for name, default in defaults.items()))


def _translate_slurm() -> None:
    """Set torchrun's environment variables from srun's; an address and a port that are set stay.
    Raise a UserError if nodes have different numbers of tasks."""
    slurm = os.environ
    per_node = slurm.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as "8(x4)", or "2,1"
    if "," in per_node:
        raise UserError(f"srun: expected equal numbers of tasks on all nodes, got {per_node}")
    # "gpu[07-08,12],login1" begins with gpu07.
    hosts = re.sub(r"\[(\w+)[^\]]*\]", r"\1", slurm["SLURM_STEP_NODELIST"])
    tasks = slurm["SLURM_STEP_NUM_TASKS"]
    os.environ.setdefault("MASTER_ADDR", hosts.split(",")[0])
    os.environ.setdefault("MASTER_PORT", str(15_000 + int(slurm["SLURM_JOB_ID"]) % 10_000))
    os.environ |= {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(tasks) // int(slurm["SLURM_STEP_NUM_NODES"])),
        "GROUP_RANK": slurm["SLURM_NODEID"],
    }


def cores() -> int:
    """Return the number of cores that this process may use: often fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Return the default number of CPU threads: ``OMP_NUM_THREADS``, or one per core."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(requested) if requested else cores()


def use_cores(threads: int | None = None) -> None:
    """Compute with so many CPU threads (None: the default), and keep freed memory for reuse.

    By default glibc returns large blocks to the system when they are freed; page faults of new ones
    can take a third of a forward pass.
    """
    import torch  # slow import

    torch.set_num_threads(threads or default_threads())
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        if libc.mallopt(M_MMAP_THRESHOLD, KEPT_MEMORY):  # older ones refuse so much
            libc.mallopt(M_TRIM_THRESHOLD, KEPT_MEMORY)


RECEIVED: list[str] = []
"""Names of signals to stop, in the order in which they came."""


def stop_on_signals() -> None:
    """Let signals of a batch system raise a ``PreemptedError``, which cleans up temporary files."""

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Python ignores the error in some callbacks of imports: check_signals reads the name then.
        RECEIVED.append(name)
        raise PreemptedError(f"Stopped ({name}).", name)

    RECEIVED.clear()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)


def check_signals() -> None:
    """Raise a PreemptedError if that of a signal was ignored, or came in a run's last step."""
    if RECEIVED:
        raise PreemptedError(f"Stopped ({RECEIVED[0]}).", RECEIVED[0])


def requeue(reason: str) -> None:
    """Requeue the SLURM job of this process, if it has one and SLURM has announced its end; called
    by one process, after saving."""
    job = os.environ.get("SLURM_JOB_ID")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None or reason not in ANNOUNCED:
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        refusal = f"{error.stdout} {error.stderr}"
    except OSError as error:
        refusal = str(error)
    else:
        return
    words = " ".join(refusal.split())
    print(f"error: {' '.join(command)}: {words}; submit the job again to resume", file=sys.stderr)
