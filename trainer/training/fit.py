"""One training run from start or checkpoint to its last step, as one ``Trainer.fit``."""

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from trainer.checkpoint import Writer, check_sound, newest_checkpoint, read_state, settle, step_name
from trainer.common.errors import PreemptedError, UserError
from trainer.common.processes import RECEIVED, current_ranks
from trainer.common.progress import Progress
from trainer.common.ranks import device_of, on_rank_zero
from trainer.common.registry import check_call
from trainer.config import DataConfig, RunConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.lightning.datamodule import Batches, StepLoader
from trainer.lightning.drop import DropPositions
from trainer.lightning.strategy import SHARDED
from trainer.runs.directory import read_metrics, write_metrics
from trainer.runs.models import name_and_role
from trainer.runs.phases import Phases, Run
from trainer.training.dashboards import dashboards
from trainer.training.run import RunCallback, check_divergence
from trainer.training.setup import (
    compiles,
    distribute,
    make_decoder,
    make_module,
    make_trainer,
    numerics,
    quiet_lightning,
    set_weights,
)
from trainer.training.strategies import make_strategy

log = logging.getLogger(__name__)

SETS_SCHEDULES = (
    of_lightning.BatchSizeFinder,
    of_lightning.GradientAccumulationScheduler,
    of_lightning.LearningRateFinder,
    of_lightning.StochasticWeightAveraging,
)
"""Callbacks of Lightning that set learning rates or batches, which a run computes from its step."""


def train(
    run: Run,
    corpus: Corpus,
    branch: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    *,
    start_time: float | None = None,
) -> Path:
    """Train to the last step, from the run's newest checkpoint if any; return the last one.

    ``branch``: checkpoint of another run to continue, with its metrics, if this run has none.
    ``callbacks``: those of the user, see :func:`user_callbacks`.
    ``start_time``: when the program began, in seconds since the epoch, from which
    ``trainer.max_time`` counts; None: now.

    Raises:
        UserError: the checkpoint or a callback does not fit the run.
        DivergedError: the run diverged.
        PreemptedError: the run was asked to stop, and has.
    """
    gc.collect()  # the trainer of a run before is a reference cycle
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    config = run.config
    settings = config.trainer
    directory = run.directory / "checkpoints"
    checkpoint, state = starting_point(run.directory, corpus, branch)
    if not run.is_control and "tally" in state:
        check_divergence(int(state["tally"]["skipped_in_a_row"]), state["step"], directory)
    last_checkpoint = directory / step_name(run.steps)
    if state["step"] == run.steps:
        return last_checkpoint
    if checkpoint is None and run.weights is not None:
        tokenizer = run.weights.tokenizer
        if tokenizer is None or same_tokens(tokenizer, corpus.tokenizer):
            state["token_files"] = dict(run.weights.token_files)
    torch.manual_seed(config.seed + current_ranks().rank)
    model = make_decoder(run, vocabulary_size(corpus.tokenizer))
    title = f"Training {name_and_role(config, run.phases, 0)[0]}"
    if run.phases.drop_step:
        title = f"{title} (drop after step {run.phases.drop_step:,})"
    log.info("%s: %s parameters", title, f"{sum(p.numel() for p in model.parameters()):,}")
    device = device_of(settings.accelerator)
    strategy = make_strategy(config.strategy.name, device, settings.deterministic)
    writer = Writer(directory, settings.keep_checkpoints, run.kept_steps, settings.keep_every)
    with (
        quiet_lightning(),
        Progress(title, run.phases.tokens) as progress,
        numerics(settings),
        stop_requests(settings.max_time, start_time or time.time()) as stop_requested,
        closing(writer),
    ):
        distribute(run, model)
        if checkpoint is None:
            set_weights(run, model)
        module = make_module(run, model)
        callback = RunCallback(run, module, corpus, state, writer, progress, stop_requested)
        strategy.writer = writer
        strategy.describe = callback.describe
        trainer = make_trainer(run, strategy, dashboards(run), [*callbacks, callback])
        data = PhaseData(run.phases, corpus, compiles=compiles(settings))
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        except MisconfigurationException as error:  # of a callback, such as one without a logger
            raise UserError(f"callbacks: {error}") from error
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # which Lightning hides
                raise KeyboardInterrupt from None
            raise
    if trainer.global_step < run.steps:
        raise UserError(f"callbacks: one stopped the run after step {trainer.global_step}")
    module.to("meta")  # the checkpoint has its contents
    return last_checkpoint


def starting_point(
    run_dir: Path, corpus: Corpus, branch: Path | None
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that a run resumes from and its ``state.json``: the newest sound one,
    else ``branch``, else None and step 0. Cut the metrics file to it.

    All ranks call this together.

    Raises:
        UserError: all checkpoints of the run are damaged, or it was trained on another text.
    """
    directory = run_dir / "checkpoints"
    metrics = run_dir / "metrics.csv"
    source = metrics
    on_rank_zero(lambda: settle(directory))
    start = newest_checkpoint(directory)
    if start is None and branch is not None:
        start = check_sound(branch)
        source = branch.parent.parent / "metrics.csv"
    state: dict[str, Any] = {"step": 0}
    if start is not None:
        state = on_rank_zero(lambda: read_state(start))
        if state["texts"] != corpus.fingerprints:
            raise UserError("data: the checkpoint was trained on another text than this run")
        log.info("Resuming from %s (step %d)", start.name, state["step"])
    state["rows"] = on_rank_zero(lambda: _copy_rows(source, metrics, state))
    return start, state


def _copy_rows(source: Path, target: Path, state: Mapping[str, Any]) -> int:
    """Copy the rows of metrics up to a checkpoint, and return their number."""
    step = state["step"]
    rows = [row for row in read_metrics(source) if row["step"] <= step]
    expected = state.get("rows", len(rows))
    if len(rows) != expected:
        log.warning("%s: expected %d rows up to step %d, got %d", source, expected, step, len(rows))
    write_metrics(target, rows)
    return len(rows)


def user_callbacks(config: RunConfig) -> list[L.Callback]:
    """Create the configured callbacks; raise a UserError if one cannot be created, or would do
    something else than its name says."""
    callbacks: list[L.Callback] = []
    for name, values in config.callbacks.items():
        arguments = dict(values)
        module, _, attribute = str(arguments.pop("_target_", "")).rpartition(".")
        try:
            create = resolve_name(f"{module}:{attribute}")
            check_call(attribute, create, **arguments)
            callback = create(**arguments)
        except (ImportError, AttributeError, ValueError, MisconfigurationException) as error:
            raise UserError(f"callbacks.{name}: cannot create its _target_: {error}") from error
        if isinstance(callback, DropPositions):
            raise UserError(f"callbacks.{name}: a run drops its encoding by drop.at")
        if isinstance(callback, SETS_SCHEDULES):
            raise UserError(f"callbacks.{name}: learning rates and batches of a run are its own")
        if config.strategy.name in SHARDED and isinstance(callback, of_lightning.WeightAveraging):
            raise UserError(f"callbacks.{name}: averages need whole weights (single or ddp)")
        callbacks.append(callback)
    return callbacks


class PhaseData(L.LightningDataModule):
    """Batches of a run: Lightning asks for those of a phase when its epoch begins or resumes."""

    def __init__(self, phases: Phases, corpus: Corpus, *, compiles: bool) -> None:
        super().__init__()
        self.phases = phases
        self.corpus = corpus
        self.compiles = compiles
        self.shape: tuple[int, DataConfig] | None = None
        """Batch size and text of the last phase."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's micro-batches from the present step to the end of its phase.

        Sets the trainer's ``accumulate_grad_batches`` to their number in a step of this phase.
        """
        trainer = self.trainer
        assert trainer is not None
        phase = self.phases.at(trainer.global_step)
        micro_batches = phase.micro_batches(trainer.world_size)
        trainer.accumulate_grad_batches = micro_batches
        shape = phase.batch_size, phase.data
        if shape != self.shape and self.compiles:
            torch.compiler.reset()  # compile for this length; with others sizes become dynamic
        self.shape = shape
        batches = Batches(
            TrainingSamples(self.corpus.mixed(phase.data), phase.data, phase.seed),
            phase.batch_size,
            start=trainer.global_step,
            end=phase.end,
            offset=phase.first_sample(0),
            micro_batches=micro_batches,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
        )
        return StepLoader(batches, phase.data.num_workers, trainer)


@contextmanager
def stop_requests(max_time: str | None, start_time: float) -> Iterator[Callable[[], str | None]]:
    """Note within the block what asks a run to stop: a signal, or ``max_time`` since the start.

    SLURM announces preemption with SIGTERM, and the end of a job with the signal of ``--signal``. A
    second Ctrl-C ends the process immediately. Yields a function that returns the first signal's
    name, "time limit" or None.
    """
    deadline = math.inf
    if max_time is not None:
        hours, minutes, seconds = map(int, max_time.split(":"))
        deadline = start_time + 3600 * hours + 60 * minutes + seconds

    def stop_requested() -> str | None:
        if RECEIVED:
            return RECEIVED[0]
        return "time limit" if time.time() > deadline else None

    def on_signal(number: int, frame: FrameType | None) -> None:
        if RECEIVED and number == signal.SIGINT:
            raise KeyboardInterrupt
        RECEIVED.append(signal.Signals(number).name)
        log.warning("%s: stopping after the current step", RECEIVED[-1])

    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop_requested
    except (PreemptedError, KeyboardInterrupt):
        RECEIVED.clear()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
