"""One training run from start or checkpoint to its last step, phase by phase."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.checkpoint import step_name
from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.common.ranks import current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import vocabulary_size
from trainer.lightning.callbacks import PhaseStart, Run, StepEnd, StopRequest, check_divergence
from trainer.lightning.datamodule import TokenData
from trainer.lightning.metrics import dashboards
from trainer.lightning.module import LanguageModule
from trainer.lightning.setup import compiles, make_decoder, make_module, make_trainer, numerics
from trainer.positional.layout import Layout
from trainer.runs.descriptions import label
from trainer.runs.models import starting_weights
from trainer.runs.phases import phase_at, phases_of
from trainer.runs.starting_point import (
    check_same_data,
    samples_of,
    starting_point,
)

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
    callbacks: Sequence[L.Callback] = (),
    *,
    is_control: bool = False,
    start_time: float | None = None,
) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` if there is one.

    Args:
        config: the run.
        corpus: its text.
        branch: checkpoint of another run to continue, with its metrics, if this run has none.
        callbacks: follow all others.
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
    if compiles(config):
        torch.compiler.reset()  # shapes of an earlier run in this process would make sizes dynamic
    start = starting_point(config, branch)
    torch.manual_seed(config.seed + ranks.rank)
    weights = starting_weights(config.model) if start.checkpoint is None else None
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if start.checkpoint is not None:
        check_same_data(start.state, corpus, config)
        model.layout = Layout.from_dict(start.state["layout"])
        if not is_control:
            check_divergence(start.state["tally"]["skipped_in_a_row"], start.step, directory)
    effects = start.state.get("effects", {})
    if start.step < last_step:
        module = make_module(config, model, ranks, weights, draws=start.checkpoint is None)
        title = f"Training {label(config)}"
        count = sum(p.numel() for p in model.parameters())
        log.info("%s: %s parameters", title, f"{count:,}")
        with (
            Progress(title, last_step, config.tokens_per_step, not ranks.is_rank_zero) as progress,
            numerics(config),
            StopRequest(config.trainer.max_time, start_time).listening() as stop,
        ):
            run = Run(config, corpus, start, weights, ranks, progress)
            with closing(run.writer):
                _fit_phases(run, module, stop, callbacks, ends_diverged=not is_control)
        effects = run.effects
        module.to("meta")  # the checkpoint has its contents
    is_whole = start.checkpoint in (None, branch)
    seconds = time.perf_counter() - clock if is_whole else None
    return TrainedRun(config, directory / step_name(last_step), effects, seconds)


def _fit_phases(
    run: Run,
    module: LanguageModule,
    stop: StopRequest,
    callbacks: Sequence[L.Callback],
    ends_diverged: bool,
) -> None:
    """Train the phases that are left, each by a trainer of its own."""
    loggers, last_shape = dashboards(run.config), None
    for phase in run.phases[run.phases.index(phase_at(run.phases, run.step)) :]:
        gc.collect()  # a finished trainer is a reference cycle; a previous DDP has hooks
        settings = phase.config
        shape = settings.trainer.batch_size, settings.data
        if last_shape not in (None, shape) and compiles(run.config):
            torch.compiler.reset()  # compile for the new length, not for dynamic ones
        last_shape = shape
        data = TokenData(
            run.corpus,
            settings.data.sequence_length,
            settings.trainer.batch_size,
            workers=settings.data.num_workers,
            samples=samples_of(run.corpus, phase),
            first=phase.first_sample,
        )
        first, last = PhaseStart(run, phase), StepEnd(run, phase, stop, ends_diverged)
        all_callbacks = [first, *run.user_callbacks, last, *callbacks]
        trainer = make_trainer(phase, run.ranks, loggers, all_callbacks)
        trainer.fit(module, datamodule=data)
        if trainer.global_step < phase.end:
            raise UserError(f"callbacks: one stopped the run after step {trainer.global_step}")
