"""One training run from start or checkpoint to its last step, phase by phase."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainer.checkpoint import check_sound, newest_checkpoint, read_state, step_name
from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.common.ranks import current_ranks, on_rank_zero
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.lightning.datamodule import TokenData
from trainer.lightning.module import LanguageModule
from trainer.positional.layout import Layout
from trainer.runs.directory import read_metrics, write_metrics
from trainer.runs.models import name_and_role, starting_weights
from trainer.runs.phases import phase_at
from trainer.training.dashboards import dashboards
from trainer.training.run import RunCallback, check_divergence
from trainer.training.setup import (
    compiles,
    make_decoder,
    make_module,
    make_trainer,
    numerics,
)

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    corpus: Corpus,
    branch: Path | None = None,
    *,
    is_control: bool = False,
    start_time: float | None = None,
) -> Path:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` if there is one;
    return the last checkpoint.

    Args:
        config: the run.
        corpus: its text.
        branch: checkpoint of another run to continue, with its metrics, if this run has none.
        is_control: go on if updates are skipped without end, so that the run which this one is
            compared with is evaluated all the same.
        start_time: when the program began, in seconds since the epoch, from which
            ``trainer.max_time`` counts; None: now.

    Raises:
        UserError: the checkpoint does not fit the run.
        DivergedError: the run diverged.
        PreemptedError: the run was asked to stop, and has.
    """
    last_step = config.trainer.max_steps
    directory = Path(config.run_dir) / "checkpoints"
    checkpoint, state = on_rank_zero(lambda: starting_point(directory.parent, corpus, branch))
    torch.manual_seed(config.seed + current_ranks().rank)
    weights = starting_weights(config.model) if checkpoint is None else None
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if checkpoint is not None:
        model.layout = Layout.from_dict(state["layout"])
        if not is_control:
            check_divergence(state["tally"]["skipped_in_a_row"], state["step"], directory)
    # The published model's files about tokens, unless this run has another tokenizer.
    if weights is not None and (
        weights.tokenizer is None or same_tokens(weights.tokenizer, corpus.tokenizer)
    ):
        state["token_files"] = dict(weights.token_files)
    if state["step"] < last_step:
        module = make_module(config, model, weights, draws=checkpoint is None)
        title = f"Training {name_and_role(config)[0]}"
        count = sum(p.numel() for p in model.parameters())
        log.info("%s: %s parameters", title, f"{count:,}")
        with (
            Progress(title, last_step, config.tokens_per_step) as progress,
            numerics(config),
            stop_requests(config.trainer.max_time, start_time or time.time()) as asked,
        ):
            run = RunCallback(config, corpus, checkpoint, state, progress, asked, is_control)
            with closing(run.writer):
                fit_phases(run, module)
        module.to("meta")  # the checkpoint has its contents
    return directory / step_name(last_step)


def starting_point(
    run_dir: Path, corpus: Corpus, branch: Path | None
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that a run resumes from and its ``state.json``: the newest sound one,
    else ``branch``, else None and step 0. Cut the metrics file to it.

    Rank 0 calls this.

    Raises:
        UserError: all checkpoints of the run are damaged, or it was trained on another text.
    """
    directory = run_dir / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    for partly in directory.glob(".*.partial"):  # of a killed process
        shutil.rmtree(partly)
    start = newest_checkpoint(directory) or (branch and check_sound(branch))
    state: dict[str, Any] = {"step": 0}
    if start is not None:
        state = read_state(start)
        if state["texts"] != corpus.fingerprints:
            raise UserError("data: the checkpoint was trained on another text than this run")
        log.info("Resuming from %s (step %d)", start.name, state["step"])
    metrics = run_dir / "metrics.csv"
    of_branch = branch is not None and not metrics.exists()
    rows = read_metrics(branch.parent.parent / "metrics.csv" if branch and of_branch else metrics)
    write_metrics(metrics, [row for row in rows if row["step"] <= state["step"]])
    return start, state


def fit_phases(run: RunCallback, module: LanguageModule) -> None:
    """Train the phases that are left, each by a trainer of its own."""
    loggers, last_shape = dashboards(run.config), None
    for phase in run.phases[run.phases.index(phase_at(run.phases, run.step)) :]:
        gc.collect()  # a finished trainer is a reference cycle; a previous DDP has hooks
        run.phase, settings = phase, phase.config
        shape = settings.trainer.batch_size, settings.data
        if shape != last_shape and compiles(run.config):
            torch.compiler.reset()  # compile for this length; with others sizes become dynamic
        last_shape = shape
        data = TokenData(
            run.corpus,
            settings.data.sequence_length,
            settings.trainer.batch_size,
            workers=settings.data.num_workers,
            samples=TrainingSamples(run.corpus.mixed(settings.data), settings.data, phase.seed),
            offset=phase.first_sample(0),
        )
        # ours last: rows and checkpoints have what the others did in a step
        trainer = make_trainer(phase, loggers, [*run.user_callbacks, run])
        trainer.fit(module, datamodule=data)
        run.step = trainer.global_step
        if run.step < phase.end:
            raise UserError(f"callbacks: one stopped the run after step {run.step}")


@contextmanager
def stop_requests(max_time: str | None, start_time: float) -> Iterator[Callable[[], str | None]]:
    """Note within the block what asks a run to stop: a signal, or ``max_time`` since the start.

    SLURM announces preemption with SIGTERM, and the end of a job with the signal of ``--signal``. A
    second Ctrl-C ends the process immediately. The block gets a function that returns the first
    signal's name, "time limit" or None.
    """
    names: list[str] = []
    deadline = math.inf
    if max_time is not None:
        hours, minutes, seconds = map(int, max_time.split(":"))
        deadline = start_time + 3600 * hours + 60 * minutes + seconds

    def asked() -> str | None:
        return names[0] if names else "time limit" if time.time() > deadline else None

    def note(number: int, frame: FrameType | None) -> None:
        if names and number == signal.SIGINT:
            raise KeyboardInterrupt
        names.append(signal.Signals(number).name)
        log.warning("%s: stopping after the current step", names[-1])

    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
