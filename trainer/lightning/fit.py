"""One training run from start or checkpoint to its last step, phase by phase."""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainer.checkpoint import step_name
from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.common.ranks import current_ranks, on_rank_zero
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.lightning.datamodule import TokenData
from trainer.lightning.metrics import dashboards
from trainer.lightning.module import LanguageModule
from trainer.lightning.run import RunCallback, check_divergence
from trainer.lightning.setup import (
    compiles,
    make_decoder,
    make_module,
    make_trainer,
    numerics,
)
from trainer.positional.layout import Layout
from trainer.runs.descriptions import name_and_role
from trainer.runs.models import starting_weights
from trainer.runs.phases import phase_at, phases_of
from trainer.runs.starting_point import samples_of, starting_point

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    ``checkpoint`` is the last one; ``effects`` of changes are by phase. ``seconds``: duration of
    its training; None if another process began it.
    """

    config: RunConfig
    checkpoint: Path
    effects: dict[str, dict[str, Any]]
    seconds: float | None

    @property
    def effect_of_drop(self) -> dict[str, Any] | None:
        """Effect of the first drop; None without a drop."""
        dropped = (phase.name for phase in phases_of(self.config) if phase.settings.drop)
        return next((self.effects[name] for name in dropped if name in self.effects), None)


def train(
    config: RunConfig,
    corpus: Corpus,
    branch: Path | None = None,
    *,
    is_control: bool = False,
    start_time: float | None = None,
) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` if there is one.

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
    start_time, clock = start_time or time.time(), time.perf_counter()
    ranks, last_step = current_ranks(), config.trainer.max_steps
    directory = Path(config.run_dir) / "checkpoints"
    checkpoint, state = on_rank_zero(lambda: starting_point(directory.parent, corpus, branch))
    torch.manual_seed(config.seed + ranks.rank)
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
    effects = state.get("effects", {})
    if state["step"] < last_step:
        module = make_module(config, model, ranks, weights, draws=checkpoint is None)
        title = f"Training {name_and_role(config)[0]}"
        count = sum(p.numel() for p in model.parameters())
        log.info("%s: %s parameters", title, f"{count:,}")
        with (
            Progress(title, last_step, config.tokens_per_step, not ranks.is_rank_zero) as progress,
            numerics(config),
            stop_requests(config.trainer.max_time, start_time) as asked,
        ):
            run = RunCallback(config, corpus, checkpoint, state, progress, asked, is_control)
            with closing(run.writer):
                fit_phases(run, module)
        effects = run.effects
        module.to("meta")  # the checkpoint has its contents
    is_whole = checkpoint in (None, branch)
    duration = time.perf_counter() - clock if is_whole else None
    return TrainedRun(config, directory / step_name(last_step), effects, duration)


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
            samples=samples_of(run.corpus, phase),
            offset=phase.first_sample(0),
        )
        # ours last: rows and checkpoints have what the others did in a step
        trainer = make_trainer(phase, run.ranks, loggers, [*run.user_callbacks, run])
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
