"""One training run from start or checkpoint to its last step, phase by phase.

The callbacks of a step, in their order: restore (State), change the model and measure the effect
(PhaseChange), the user's own, measure (Monitors), write a row (Metrics), save (Saving), stop
(Stopping).
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.checkpoint import Writer, restore, step_name, versions
from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.common.ranks import Ranks, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.callbacks import Metrics, Saving, Stopping, check_divergence
from trainer.lightning.datamodule import TokenData
from trainer.lightning.devices import compiles, numerics
from trainer.lightning.loggers import make_loggers
from trainer.lightning.module import LanguageModule
from trainer.lightning.monitors import Monitors
from trainer.lightning.phases import PhaseChange, effect_probe
from trainer.lightning.setup import (
    make_callbacks,
    make_decoder,
    make_module,
    make_trainer,
    peak_of_ranks,
)
from trainer.positional.layout import Layout
from trainer.runs.descriptions import label
from trainer.runs.phases import kept_steps, phase_at, phase_before, phases_of
from trainer.runs.starting_point import (
    Start,
    check_same_data,
    data_fingerprints,
    epochs_read,
    samples_of,
    starting_point,
    starting_weights,
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
    began, clock = start_time or time.time(), time.perf_counter()
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
        state = State(config, corpus, start, weights)
        title = f"Training {label(config)}"
        count = sum(p.numel() for p in model.parameters())
        # weights and AdamW's two moments in float32
        size = f"{12e-9 * count:.1f} GB a checkpoint"
        log.info("%s: %s parameters, %s", title, f"{count:,}", size)
        with (
            Progress(title, last_step, config.tokens_per_step, not ranks.is_rank_zero) as progress,
            numerics(config),
        ):
            effects = _fit(config, module, state, ranks, progress, began, is_control, callbacks)
        module.to("meta")  # the checkpoint has its contents
    is_whole = start.checkpoint in (None, branch)
    seconds = time.perf_counter() - clock if is_whole else None
    return TrainedRun(config, directory / step_name(last_step), effects, seconds)


def _fit(
    config: RunConfig,
    module: LanguageModule,
    state: State,
    ranks: Ranks,
    progress: Progress,
    began: float,
    is_control: bool,
    more: Sequence[L.Callback],
) -> dict[str, dict[str, Any]]:
    """Train the phases that are left; return the effects of their changes."""
    run, phases, corpus = config.trainer, phases_of(config), state.corpus
    directory, permanent = Path(config.run_dir) / "checkpoints", kept_steps(config)
    loggers, user_callbacks = make_loggers(config), make_callbacks(config.callbacks)
    metrics = Metrics(
        phases,
        epochs_read(corpus, phases),
        progress,
        None if is_control else directory,
        peak_of_ranks(config),
    )
    writer = Writer(directory, run.keep_checkpoints, run.keep_every, permanent)
    saving = Saving(
        writer, run.checkpoint_every, run.checkpoint_minutes, permanent, state.contents, metrics
    )
    rows = run.batch_size // (run.accumulation(ranks.world_size) * ranks.world_size)
    change = PhaseChange(phases, partial(effect_probe, corpus, rows), saving, metrics)
    monitors = Monitors(config, corpus, ranks, change, metrics)
    deadline = None
    if run.max_time is not None:
        hours, minutes, seconds = map(int, run.max_time.split(":"))
        deadline = began + 3600 * hours + 60 * minutes + seconds
    stopping = Stopping(saving, run.max_steps, deadline)
    state.callbacks, state.user_callbacks = (metrics, change, monitors), user_callbacks
    callbacks = [state, change, *user_callbacks, monitors, metrics, saving, stopping]
    last_shape = None
    with stopping.listening(), closing(writer):
        for phase in phases[phases.index(phase_at(phases, state.steps)) :]:
            gc.collect()  # a finished trainer is a reference cycle; a previous DDP has hooks
            settings = phase.config
            shape = settings.trainer.batch_size, settings.data
            if last_shape not in (None, shape) and compiles(config):
                torch.compiler.reset()  # compile for the new length, not for dynamic ones
            last_shape = shape
            data = TokenData(
                corpus,
                settings.data.sequence_length,
                settings.trainer.batch_size,
                workers=settings.data.num_workers,
                samples=samples_of(corpus, phase),
                first=phase.first_sample,
            )
            trainer = make_trainer(phase, ranks, loggers, [*callbacks, *more])
            trainer.fit(module, datamodule=data)
            if trainer.global_step < phase.end:
                raise UserError(f"callbacks: one stopped the run after step {trainer.global_step}")
    return change.effects


class State(L.Callback):
    """Contents of a run's checkpoints, and the updates done.

    It is the first callback, so that all others start from the restored run. The data loader begins
    at the right step, so Lightning's loops need no other state. ``callbacks`` have parts of
    ``state.json`` as their state.
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, start: Start, weights: Pretrained | None
    ) -> None:
        self.config, self.corpus, self.start = config, corpus, start
        self.checkpoint, self.steps = start.checkpoint, start.step
        self.callbacks: Sequence[L.Callback] = ()
        self.user_callbacks: Sequence[L.Callback] = ()
        # The published model's files about tokens, unless this run has another tokenizer.
        self.token_files: dict[str, str] = start.state.get("token_files", {})
        if weights is not None:
            theirs = weights.tokenizer
            if theirs is None or same_tokens(theirs, corpus.tokenizer):
                self.token_files = dict(weights.token_files)

    def contents(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the contents of ``state.json``; all ranks call this together."""
        step, module, corpus = trainer.global_step, trainer.lightning_module, self.corpus
        assert isinstance(module, LanguageModule)
        phase = phase_before(phases_of(self.config), step)
        state = {
            "step": step,
            "tokens": phase.tokens_at(step),
            "model": asdict(module.model.config),
            "layout": module.model.layout.to_dict(),
            "tokenizer": corpus.tokenizer.to_str(),
            "end_of_text": corpus.end_of_text,
            "token_files": self.token_files,
            "config": json.loads(json.dumps(asdict(self.config))),
            "versions": versions(),
            "data": data_fingerprints(corpus, phase),
            "tally": module.tally.state(),
            "user_callbacks": {c.state_key: c.state_dict() for c in self.user_callbacks},
        }
        for callback in self.callbacks:
            state |= callback.state_dict()
        return state

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the checkpoint, when model and optimizer are on their devices."""
        if self.checkpoint is not None:
            assert isinstance(pl_module, LanguageModule)
            restore(pl_module.model, trainer.optimizers[0], self.checkpoint)
            pl_module.tally.load(self.start.state["tally"], pl_module.device)
            for callback in self.callbacks:
                callback.load_state_dict(self.start.state)
            saved = self.start.state["user_callbacks"]
            for callback in self.user_callbacks:
                if callback.state_key in saved:
                    callback.load_state_dict(saved[callback.state_key])
            self.checkpoint = None
        # Lightning has no public way to begin at a step without a checkpoint of its own.
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the updates done, for the next phase."""
        self.steps = trainer.global_step
