"""Fault injection: whether a small copy of an experiment survives the faults of clusters.

Every fault is injected into a separate run in separate processes. The run is then started again
with the same configuration, and must end bitwise like a run without faults: every row of its
metrics, every tensor of its last checkpoint.
"""

from __future__ import annotations

import math
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
from typing import Any, TypeVar

import lightning as L
import torch

from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError
from trainer.data.config import DataConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.evaluation.config import EvaluationConfig
from trainer.recalibration.config import ChangeConfig, ScheduleConfig
from trainer.runs.checkpoints import regular_checkpoints, step_name
from trainer.runs.config import PhaseConfig, RunConfig
from trainer.runs.metrics_file import TIMES, read_metrics
from trainer.runs.ranks import process_group
from trainer.runs.state import load, read_metadata
from trainer.runs.training_config import LoggerConfig, TrainerConfig
from trainer.training.callbacks import saving
from trainer.training.run import train

STEPS, DROP, EVERY, LENGTH, BATCH = 24, 12, 4, 128, 8
"""Steps of the copy, step of its drop, steps between checkpoints, tokens of a sequence and
sequences of a step."""
LONGER = 4
"""Largest factor by which a phase lengthens the sequences."""
ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative tolerance of losses when the number of ranks changes."""

OF_A_JOB = ("TORCHELASTIC_USE_AGENT_STORE", "UNROPE_REQUEUE_FILE", "SLURM_JOB_END_TIME")
"""Variables of torchrun and a SLURM job that a drill's processes must not see: with them they would
use the job's store, ask for its requeue, or stop before its end."""

Change = TypeVar("Change", bound=ChangeConfig)


@dataclass(frozen=True)
class Fault:
    """A fault after ``step`` updates of a run."""

    name: str
    step: int
    signal: signal.Signals = signal.SIGKILL
    """Signal to all processes of the run."""
    while_saving: bool = False
    """Whether the run is killed once the tensors of the step's checkpoint are written, before the
    rest."""
    corrupt: Callable[[Path], object] | None = None
    """Damages a file of the newest checkpoint afterwards."""
    ranks: tuple[int, int] | None = None
    """Processes before and after the fault; None for no change."""


@dataclass(frozen=True)
class Outcome:
    """The result of a fault."""

    fault: Fault
    difference: str
    """The first difference from the run without faults, or ""."""
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
            difference = first_difference(small, broken, exactly=fault.ranks is None)
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
    log_path = Path(f"{config.run_dir}.log")
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_process, args=(config, corpus, rank, ranks, port, fault, log_path))
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
        last = log_path.read_text().strip().splitlines()[-1:]
        raise DrillError(f"exit codes {codes}, expected {expected}; {' '.join(last)}")


def _process(
    config: RunConfig,
    corpus: Corpus,
    rank: int,
    ranks: int,
    port: int,
    fault: Fault | None,
    log_path: Path,
) -> None:
    for name in OF_A_JOB:
        os.environ.pop(name, None)
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
    with log_path.open("a", buffering=1) as file:
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


def shrink(config: RunConfig, directory: Path) -> RunConfig:
    """Return a copy with the same features, in a model and for a number of steps that take seconds.

    The text is the built-in one, and nothing is compiled, evaluated or sent to a dashboard.
    Encodings, layout, QK-norm, drop, phases, optimizer, schedules, precision and strategy stay.
    """
    C = min(config.data.sequence_length, LENGTH)
    windows = [w and min(w, C) for w in config.positional.windows]
    depth = min(config.model.num_hidden_layers, max(2, len(config.positional.layers)))
    drop = replace(config.drop, effect_sequences=4)
    if config.drop_step is not None and not config.phases:
        drop = replace(_shrunk(drop, depth, STEPS - DROP, C), at=DROP, at_tokens=None)
        drop = replace(drop, schedule=_quick(drop.schedule))
    count = max(len(config.phases), 1)
    steps = [STEPS // count + (index < STEPS % count) for index in range(count)]
    parts = zip(config.phases.items(), steps, strict=False)
    return replace(
        config,
        phases={name: _phase(config, phase, C, depth, n) for (name, phase), n in parts},
        run_dir=str(directory),
        overwrite=False,
        controls={},
        model=replace(
            config.model,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=depth,
            head_dim=min(config.model.head_size, 32),
            vocab_size=None,
            from_pretrained=None,
            from_run=None,
            attention_backend="auto",
        ),
        positional=replace(config.positional, windows=windows),
        data=DataConfig(
            sequence_length=C,
            document_mask=config.data.document_mask,
            needles=config.data.needles,
            num_workers=min(config.data.num_workers, 1),
            cache_dir=config.data.cache_dir,
        ),
        tokenizer=replace(config.tokenizer, path=None, vocab_size=512),
        schedule=_quick(config.schedule),
        drop=drop,
        trainer=TrainerConfig(
            max_steps=STEPS,
            batch_size=BATCH,
            micro_batch_size=2,
            precision=config.trainer.precision,
            accelerator="cpu",
            threads=1,
            gradient_clip=config.trainer.gradient_clip,
            z_loss=config.trainer.z_loss,
            log_every=1,
            checkpoint_every=EVERY,
            keep_checkpoints=3,
        ),
        strategy=replace(config.strategy, shard_size=None, cpu_offload=False),
        logger=LoggerConfig(),
        evaluation=EvaluationConfig(enabled=False),
    )


def _phase(
    config: RunConfig, phase: PhaseConfig, longest: int, depth: int, steps: int
) -> PhaseConfig:
    """Return a phase of the same kind with ``steps`` steps."""
    length, size = phase.sequence_length, phase.batch_size
    if length is not None:
        times = length / config.data.sequence_length
        length = max(round(longest * min(times, LONGER)), 2)
    if size is not None:
        more, fewer = size > config.trainer.batch_size, size < config.trainer.batch_size
        size = 2 * BATCH if more else BATCH // 2 if fewer else BATCH
    return replace(
        phase,
        steps=steps,
        tokens=None,
        sequence_length=length,
        batch_size=size,
        micro_batch_size=None,
        weights=None,
        schedule=phase.schedule and _quick(phase.schedule),
        drop=phase.drop and _shrunk(phase.drop, depth, steps, length or longest),
        log_every=None,
        until=None,  # it would end the run at another step
    )


def _shrunk(change: Change, depth: int, steps: int, longest: int) -> Change:
    """Return a drop of layers that the copy has, within ``steps`` steps, with windows of at most
    ``longest`` tokens."""
    layers = change.layers and sorted({min(max(i, -depth), depth - 1) for i in change.layers})
    windows = change.windows and [window and min(window, longest) for window in change.windows]
    steps = min(change.anneal_steps, steps // 2)
    return replace(change, layers=layers, windows=windows, anneal_steps=steps)


def _quick(schedule: ScheduleConfig) -> ScheduleConfig:
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, 2))


def first_difference(whole: RunConfig, broken: RunConfig, exactly: bool) -> str:
    """Describe the first difference between two finished runs; return "" if there is none."""
    rows = [_rows(Path(config.run_dir)) for config in (whole, broken)]
    steps = [[row["step"] for row in part] for part in rows]
    if steps[0] != steps[1]:
        return f"rows of steps {steps[1]} instead of {steps[0]}"
    tolerance = 0.0 if exactly else ROUNDING[whole.trainer.precision]
    for expected, actual in zip(*rows, strict=True):
        for key in expected if exactly else ("loss", "learning_rate", "tokens", "phase"):
            a, b = expected[key], actual.get(key, math.nan)
            if a != b and not abs(a - b) <= tolerance * abs(a):
                return f"{key} at step {expected['step']}: {b} instead of {a}"
    if not exactly:
        return ""
    last = step_name(whole.trainer.max_steps)
    a, b = (_tensors(Path(c.run_dir) / "checkpoints" / last) for c in (whole, broken))
    if a.keys() != b.keys():
        return f"the last checkpoint holds other tensors: {sorted(a.keys() ^ b.keys())[:3]}"
    different = (name for name, value in a.items() if not torch.equal(value, b[name]))
    return next((f"{name} differs in the last checkpoint" for name in different), "")


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run_dir / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in read_metadata(path).items()
    }
    load(tensors, path)
    return tensors
