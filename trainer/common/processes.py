"""This process: its CPU cores, signals that end it, and the requeue of its SLURM job."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from types import FrameType

from trainer.common.errors import ANNOUNCED, PreemptedError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, from malloc.h."""
KEPT_MEMORY = 1 << 28
"""Bytes of the largest freed block that is kept, and of free memory at the end of the heap."""


def cores() -> int:
    """Return the number of cores that this process may use: often fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def default_threads() -> int:
    """Return the default number of CPU threads: ``OMP_NUM_THREADS``, or one per core."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(requested) if requested else cores()


def use_cores(threads: int | None = None) -> None:
    """Compute with so many CPU threads (None: the default), and keep freed memory for reuse.

    By default glibc returns large blocks to the system when they are freed. On an AMD EPYC the page
    faults of new ones took a third of a forward pass of ``model=nano``.
    """
    import torch  # slow import

    torch.set_num_threads(threads or default_threads())
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        if libc.mallopt(M_MMAP_THRESHOLD, KEPT_MEMORY):  # older ones refuse so much
            libc.mallopt(M_TRIM_THRESHOLD, KEPT_MEMORY)


def is_alone() -> bool:
    """Whether no launcher has started other ranks of this command."""
    alone = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return int(os.environ.get("WORLD_SIZE", alone)) == 1


RECEIVED: list[str] = []
"""Names of signals to stop, in the order in which they came."""


def stop_on_signals() -> None:
    """Let the signals of a batch system end the program by a ``PreemptedError``, so that it removes
    its temporary files."""

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Python ignores the error in some callbacks of imports: check_signals reads the name then.
        RECEIVED.append(name)
        raise PreemptedError(f"Stopped ({name}).", name)

    RECEIVED.clear()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)


def check_signals() -> None:
    """Stop if a signal asked for it and its error was ignored, or came in a run's last step.

    Raises:
        PreemptedError: one did.
    """
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
