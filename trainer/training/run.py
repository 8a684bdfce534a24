"""One training run from start or checkpoint to its last step, stretch by stretch."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger

from trainer.checkpoint import check_same_model, damage, regular_checkpoints, step_name, step_of
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.progress import Progress
from trainer.common.words import same_command
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.interchange.pretrained import Pretrained
from trainer.model.backends import cudnn_attention
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout
from trainer.runs.descriptions import label
from trainer.runs.phases import phase_at, phases_of, stretch_end
from trainer.runs.ranks import Ranks, all_gather, current_ranks, on_rank_zero
from trainer.runs.saved_state import Effect, run_state
from trainer.runs.starting_point import (
    Start,
    check_same_data,
    samples_of,
    starting_point,
    starting_weights,
)
from trainer.training.callbacks.stopping import acknowledging
from trainer.training.devices import numerics
from trainer.training.lightning_trainer import TrainingData, make_trainer, releasing
from trainer.training.loggers import MetricsFile, close, other_loggers
from trainer.training.module import LanguageModule, make_decoder
from trainer.training.step import PhaseStretch, Resume, Step
from trainer.training.user_callbacks import make_callbacks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    ``checkpoint`` is the last one; ``effects`` of changes are by phase. ``seconds``: duration of
    its training; None if another process began it.
    """

    config: RunConfig
    checkpoint: Path
    effects: dict[str, Effect]
    seconds: float | None

    @property
    def effect_of_drop(self) -> Effect | None:
        """Effect of the first drop; None without a drop."""
        dropped = (phase.name for phase in phases_of(self.config) if phase.drop)
        return next((self.effects[name] for name in dropped if name in self.effects), None)


def train(
    config: RunConfig,
    corpus: Corpus,
    branch: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    user_callbacks: Sequence[L.Callback] | None = None,
    *,
    is_control: bool = False,
    start_time: float | None = None,
) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` if there is one.

    ``branch``: checkpoint of another run, with its metrics, to continue if this run has none.
    ``user_callbacks``: those that ``config.callbacks`` names; None: made here. They are made again
    for each further stretch. ``is_control``: whether to go on if updates are
    skipped without end, so that the run which this one is compared with is evaluated all the same.
    ``start_time``: when the program began, in seconds since the epoch, from which
    ``trainer.max_time`` counts; None: now.

    Raises:
        UserError: the checkpoint does not fit the run, none is sound, the last one cannot be
            written, or the backend cannot run here.
        DivergedError: the run diverged.
        PreemptedError: the run was asked to stop, and has.
    """
    start_time = time.time() if start_time is None else start_time
    clock = time.perf_counter()
    began_elsewhere: bool | None = None
    if user_callbacks is None:
        user_callbacks = make_callbacks(config.callbacks)
    if config.trainer.compile:
        torch.compiler.reset()  # shapes of an earlier run in this process would make sizes dynamic
    while True:
        # A finished trainer is a reference cycle: collect it now to free its memory.
        gc.collect()
        start = starting_point(config, branch)
        if began_elsewhere is None:
            began_elsewhere = start.checkpoint not in (None, branch)
        with numerics(config):
            stretch = _stretch(config, corpus, start, is_control)
            trained = _train_stretch(stretch, start, user_callbacks, callbacks, start_time)
        if trained.diverged is not None:
            raise _divergence(config, *trained.diverged, branch)
        if trained.step == config.trainer.max_steps:
            path = Path(config.run_dir) / "checkpoints" / step_name(trained.step)
            seconds = None if began_elsewhere else time.perf_counter() - clock
            return TrainedRun(config, path, trained.effects, seconds)
        # The checkpoint exists, and the next stretch would take long to start.
        if request := next(filter(None, all_gather(trained.stop_request)), None):
            raise PreemptedError(
                f"Stopped after step {trained.step} ({request}), checkpoint saved.",
                requeues=request != "SIGTERM",
            )
        torch.compiler.reset()  # compile for the next length, not for dynamic ones
        user_callbacks = make_callbacks(config.callbacks)


def _divergence(config: RunConfig, last_good: int, step: int, branch: Path | None) -> DivergedError:
    """Return the error of a run that diverged; all ranks call this together.

    ``last_good``: the step before the first of the skipped updates, which end with ``step``.
    """
    directory = Path(config.run_dir) / "checkpoints"
    paths = on_rank_zero(lambda: regular_checkpoints(directory))
    # Skipped updates leave the weights as they are.
    healthy = [path for path in paths if step_of(path) <= last_good] or paths[-1:]
    path = next(reversed(healthy), branch)
    return DivergedError.at(
        "trainer.max_steps",
        f"{label(config)} stopped: the loss or the gradient was not finite in steps "
        f"{last_good + 1} to {step}; the last healthy checkpoint is {str(path) if path else None}.",
    )


@dataclass(frozen=True)
class TrainedStretch:
    """Result of a stretch up to its last ``step``.

    ``effects``: of changes so far. ``diverged``: steps between which the run diverged.
    ``stop_request``: signal or limit that asked the run to stop in its last step.
    """

    step: int
    effects: dict[str, Effect]
    diverged: tuple[int, int] | None
    stop_request: str | None


def _train_stretch(
    stretch: PhaseStretch,
    start: Start,
    user_callbacks: Sequence[L.Callback],
    callbacks: Sequence[L.Callback],
    start_time: float,
) -> TrainedStretch:
    """Train from ``start`` to the end of its stretch.

    ``callbacks`` follow all others. ``start_time``: as for :func:`train`.
    """
    ranks, config, end = current_ranks(), stretch.run, stretch.config.trainer.max_steps
    torch.manual_seed(config.seed + ranks.rank)
    model, weights = _decoder(config, stretch.corpus, start, ranks)
    token_files = on_rank_zero(lambda: _token_files(start, weights, stretch.corpus))
    stretch = replace(stretch, token_files=token_files)
    module = LanguageModule(config, model, ranks, weights, start.checkpoint is not None)
    title, tokens = f"Training {label(config)}", stretch.config.tokens_per_step
    if config.phases:
        names = [p.name for p in stretch.phases if stretch.phase.start <= p.start < end]
        title += f", {' and '.join(names)}"
    with Progress(title, end, tokens, silent=not ranks.is_rank_zero) as progress:
        step = Step(stretch, module, ranks, progress, user_callbacks, start_time)
        loggers = [MetricsFile(Path(config.run_dir) / "metrics.csv"), *other_loggers(config)]
        in_order = [*step.callbacks(), *callbacks]
        if start.checkpoint is not None:
            state = run_state(start.state)
            in_order.insert(0, Resume(step, start.checkpoint, state, start.step))
        trainer = make_trainer(stretch.config, ranks, loggers, in_order)
        backend = module.choose_attention(stretch.config, trainer.strategy.root_device.type)
        count = sum(p.numel() for p in model.parameters())
        size = f"{stretch.config.trainer.batch_size} x {stretch.config.data.sequence_length:,}"
        kind = f"attention backend {backend.name} ({backend.why})"
        log.info("%s: %s parameters, %s tokens a step, %s", title, f"{count:,}", size, kind)
        if start.step < end:
            samples = samples_of(stretch.corpus, stretch.phase)
            data = TrainingData(samples, stretch.config, ranks, start.step, stretch.first_sample)
            with (
                releasing(module, trainer.strategy),
                cudnn_attention(backend.cudnn),
                acknowledging(step.stopping.notice, ranks.is_rank_zero),
            ):
                trainer.fit(module, datamodule=data)
            _raise_if_stopped(trainer, step, loggers)
        else:  # the checkpoint is the last one of the run
            state = run_state(start.state)
            step.transitions.restore(state)
            step.divergence.judge(start.step, int(state.tally.skipped_in_a_row))
            on_rank_zero(partial(close, loggers))
    diverged, request = step.divergence.diverged, step.stopping.request
    return TrainedStretch(end, step.transitions.effects, diverged, request)


def _stretch(config: RunConfig, corpus: Corpus, start: Start, is_control: bool) -> PhaseStretch:
    """Return the stretch that a run's next step belongs to."""
    phases = phases_of(config)
    phase, end = phase_at(phases, start.step), stretch_end(phases, start.step)
    return PhaseStretch(
        run=config,
        config=replace(phase.config, trainer=replace(phase.config.trainer, max_steps=end)),
        corpus=corpus,
        phases=phases,
        phase=phase,
        is_control=is_control,
    )


def _decoder(
    config: RunConfig, corpus: Corpus, start: Start, ranks: Ranks
) -> tuple[Decoder, Pretrained | None]:
    """Create the decoder with its layout at the start, without weights.

    Also returns the source of trained weights, if the run begins with them.
    """
    weights = starting_weights(config.model) if start.checkpoint is None else None
    if weights is not None and config.model.from_run is not None:
        path = Path(weights.name)
        if (wrong := on_rank_zero(lambda: damage(path))) is not None:
            raise UserError(f"model.from_run: {path.name!r} is damaged: {wrong}")
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if start.checkpoint is not None:
        check_same_model(start.state, model, start.checkpoint.name)
        on_rank_zero(lambda: check_same_data(start.state, corpus, config))
        model.layout = Layout.from_dict(start.state["layout"])
    return model, weights


def _token_files(start: Start, weights: Pretrained | None, corpus: Corpus) -> dict[str, str]:
    """Return the files about tokens of the published model in which training began, if any.

    None of a model with another tokenizer, whose token ids are others.
    """
    if weights is None:
        return start.state.get("token_files", {})
    try:
        files, theirs = weights.token_files(), weights.tokenizer
        if not files or theirs is None or same_tokens(theirs, corpus.tokenizer):
            return files
        reason = "The run's tokenizer is not that of its weights."
    except UserError as error:
        reason = error.problems[0].message
    log.warning(
        "%s Exports of this run will have no chat template and no token settings of %s.",
        *(reason, weights.name),
    )
    return {}


def _raise_if_stopped(trainer: L.Trainer, step: Step, loggers: list[Logger]) -> None:
    """Close the loggers; check that the stretch ended by itself or diverged."""
    on_rank_zero(partial(close, loggers))  # no other rank exits before rank 0
    if (reason := step.stopping.reason) is not None:
        raise PreemptedError(
            f"Stopped after step {trainer.global_step} ({reason}), checkpoint saved.",
            requeues=reason != "SIGTERM",
        )
    run = step.stretch.run
    is_complete = trainer.global_step >= step.stretch.config.trainer.max_steps
    if not is_complete and not step.divergence.diverged:
        raise UserError.at(
            "callbacks",
            f"one of them stopped the run after step {trainer.global_step} of "
            f"{run.trainer.max_steps}; leave it out, and {same_command(run.overwrite)} goes on "
            "from the newest checkpoint.",
        )
