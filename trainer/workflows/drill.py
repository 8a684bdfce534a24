"""Fault injection: whether a small copy of an experiment survives the faults of clusters.

Every fault is injected into a separate run in separate processes. The run is then started again
with the same configuration, and must end bitwise like a run without faults: every row of its
metrics, every tensor of its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.runs.checkpoints import regular_checkpoints, step_name
from trainer.runs.config import RunConfig
from trainer.runs.ranks import process_group
from trainer.runs.same_run import compare
from trainer.training.callbacks import saving
from trainer.training.run import train
from trainer.workflows.small_copy import DROP, shrink


@dataclass(frozen=True)
class Fault:
    """A fault after ``step`` updates of a run.

    ``signal``: sent to all its processes. ``while_saving``: injected when the tensors of that
    step's checkpoint are written, but nothing else of it. ``corrupt``: damages a file of the newest
    checkpoint afterwards. ``ranks``: processes before and after; None for no change.
    """

    name: str
    step: int
    signal: signal.Signals = signal.SIGKILL
    while_saving: bool = False
    corrupt: Callable[[Path], object] | None = None
    ranks: tuple[int, int] | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a fault: ``difference`` from the run without faults, empty if there is none."""

    fault: Fault
    difference: str
    seconds: float


def truncate(path: Path) -> None:
    """Cut a file short."""
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FAULTS = (
    Fault("kill -9 before the first checkpoint", 3),
    Fault("kill -9 before the drop", 7),
    Fault("kill -9 at the drop", DROP),
    Fault("kill -9 after the drop", 14),
    Fault("kill -9 near the end", 22),
    Fault("kill -9 while a checkpoint is written", 8, while_saving=True),
    Fault("kill -9 while the checkpoint of the drop is written", DROP, while_saving=True),
    Fault("SIGTERM before the drop", 5, signal.SIGTERM),
    Fault("SIGTERM at the drop", DROP, signal.SIGTERM),
    Fault("SIGUSR1 after the drop", 17, signal.SIGUSR1),
    Fault("newest checkpoint cut short", 10, corrupt=truncate),
    Fault("a bit of the newest checkpoint flipped, after the drop", 18, corrupt=flip),
    Fault("a file of the newest checkpoint missing", 15, corrupt=Path.unlink),
    Fault("one process becomes two before the drop", 9, signal.SIGTERM, ranks=(1, 2)),
    Fault("two processes become one after the drop", 16, signal.SIGTERM, ranks=(2, 1)),
)


def drill(config: RunConfig, directory: Path) -> Iterator[Outcome]:
    """Inject every fault into a small copy of a run, in ``directory``; yield the outcomes."""
    torch.set_num_threads(1)  # before forking, or the children would wait for threads
    small = shrink(config, directory / "unbroken")
    corpus = prepare_corpus(small.data, small.tokenizer)
    ranks = 1 if config.strategy.name == "single" else 2
    start(small, corpus, ranks)
    for number, fault in enumerate(FAULTS, 1):
        began = time.perf_counter()
        broken = replace(small, run_dir=str(directory / f"fault-{number:02}"))
        try:
            break_and_resume(broken, corpus, fault, ranks)
            difference = compare(small, broken, exactly=fault.ranks is None)
        except DrillError as error:
            difference = str(error)
        yield Outcome(fault, difference, time.perf_counter() - began)
        shutil.rmtree(broken.run_dir, ignore_errors=True)


class DrillError(Exception):
    """A process did not end as expected."""


def break_and_resume(config: RunConfig, corpus: Corpus, fault: Fault, ranks: int) -> None:
    """Train with a fault, then resume and train to the end.

    Raises:
        DrillError: a process did not end as expected.
    """
    before, after = fault.ranks or (ranks, ranks)
    killed = -signal.SIGKILL if fault.signal == signal.SIGKILL else REQUEUE_EXIT_CODE
    start(config, corpus, before, fault, expected=killed)
    if fault.corrupt is not None:
        newest = regular_checkpoints(Path(config.run_dir) / "checkpoints")[-1]
        fault.corrupt(max(newest.glob("__*"), key=lambda path: path.stat().st_size))
    start(config, corpus, after)


def start(
    config: RunConfig,
    corpus: Corpus,
    ranks: int,
    fault: Fault | None = None,
    expected: int = 0,
) -> None:
    """Train in forked processes and wait for their end.

    Raises:
        DrillError: an exit code differs from ``expected``.
    """
    if ranks > 1 and config.strategy.name == "single":
        config = replace(config, strategy=replace(config.strategy, name="ddp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = Path(f"{config.run_dir}.log")
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_process, args=(config, corpus, rank, ranks, port, fault, said))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if codes != [expected] * ranks:
        last = said.read_text().strip().splitlines()[-1:]
        raise DrillError(f"exit codes {codes}, expected {expected}; {' '.join(last)}")


def _process(
    config: RunConfig,
    corpus: Corpus,
    rank: int,
    ranks: int,
    port: int,
    fault: Fault | None,
    said: Path,
) -> None:
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    code = 1
    with said.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            code = _train(config, corpus, fault)
        except Exception:
            traceback.print_exc(file=file)
        finally:
            os._exit(code)  # skips the parent's exit handlers


def _train(config: RunConfig, corpus: Corpus, fault: Fault | None) -> int:
    more: list[L.Callback] = []
    if fault is not None and fault.while_saving:
        _die_while_saving(step_name(fault.step))
    elif fault is not None:
        more.append(SendSignal(fault))
    try:
        with process_group(config):
            train(config, corpus, callbacks=more)
    except PreemptedError:
        return REQUEUE_EXIT_CODE
    return 0


class SendSignal(L.Callback):
    """Sends a fault's signal to this process in the middle of the step after ``fault.step``."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Send it once: a second signal would prevent an orderly stop."""
        if trainer.global_step == self.fault.step:
            self.fault, fault = replace(self.fault, step=-1), self.fault
            os.kill(os.getpid(), fault.signal)


def _die_while_saving(name: str) -> None:
    patched: Any = saving
    original = patched.save

    def save(tensors: dict[str, torch.Tensor], directory: Path, group: Any) -> None:
        original(tensors, directory, group)
        if name in directory.name:
            os.kill(os.getpid(), signal.SIGKILL)

    patched.save = save
