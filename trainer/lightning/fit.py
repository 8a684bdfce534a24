"""One training run from start or checkpoint to its last step, phase by phase.

The callbacks of a step, in their order: change the model and measure the effect (PhaseChange), the
user's own, measure (Monitors), write a row (Metrics), save (Saving), stop (Stopping, Divergence).
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.checkpoint import Writer, check_same_model, restore, step_name, versions
from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.common.ranks import Ranks, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.callbacks import (
    SIGNALS,
    Divergence,
    Metrics,
    Saving,
    Stopping,
    check_divergence,
)
from trainer.lightning.datamodule import TokenData
from trainer.lightning.devices import numerics
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
from trainer.runs.phases import Phase, kept_steps, phase_at, phase_before, phases_of
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
        dropped = (phase.name for phase in phases_of(self.config) if phase.drop)
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
    ranks, phases, last_step = current_ranks(), phases_of(config), config.trainer.max_steps
    directory = Path(config.run_dir) / "checkpoints"
    if config.trainer.compile:
        torch.compiler.reset()  # shapes of an earlier run in this process would make sizes dynamic
    start = starting_point(config, branch)
    seconds_from = clock if start.checkpoint in (None, branch) else None
    torch.manual_seed(config.seed + ranks.rank)
    weights = starting_weights(config.model) if start.checkpoint is None else None
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if start.checkpoint is not None:
        check_same_model(start.state, model, start.checkpoint.name)
        check_same_data(start.state, corpus, config)
        model.layout = Layout.from_dict(start.state["layout"])
        check_divergence(
            0 if is_control else start.state["tally"]["skipped_in_a_row"], start.step, directory
        )
    effects = start.state.get("effects", {})
    if start.step < last_step:
        module = make_module(config, model, ranks, weights, draws=start.checkpoint is None)
        title = f"Training {label(config)}"
        count = sum(p.numel() for p in model.parameters())
        log.info("%s: %s parameters", title, f"{count:,}")
        with (
            Progress(title, last_step, config.tokens_per_step, not ranks.is_rank_zero) as progress,
            numerics(config),
        ):
            run = _Run(config, corpus, start, module, weights, progress, began, is_control)
            with run.saving_and_listening():
                for phase in phases[phases.index(phase_at(phases, start.step)) :]:
                    fit_phase(run, phase, ranks, [*run.callbacks, *callbacks])
        effects = run.change.effects
        module.to("meta")  # the checkpoint has its contents
    seconds = None if seconds_from is None else time.perf_counter() - seconds_from
    return TrainedRun(config, directory / step_name(last_step), effects, seconds)


def fit_phase(run: _Run, phase: Phase, ranks: Ranks, callbacks: list[L.Callback]) -> None:
    """Train one phase with a Lightning trainer of its own; module and optimizer go on."""
    gc.collect()  # a finished trainer is a reference cycle; a previous DDP has hooks
    config, shape = phase.config, (phase.config.trainer.batch_size, phase.config.data)
    if run.shape not in (None, shape) and config.trainer.compile:
        torch.compiler.reset()  # compile for the new length, not for dynamic ones
    run.shape = shape
    data = TokenData(
        run.corpus,
        config.data.sequence_length,
        config.trainer.batch_size,
        workers=config.data.num_workers,
        samples=samples_of(run.corpus, phase),
        first=phase.first_sample,
    )
    trainer = make_trainer(phase, ranks, run.loggers, callbacks)
    trainer.fit(run.module, datamodule=data)
    if trainer.global_step < phase.end:
        raise UserError(f"callbacks: one of them stopped the run after step {trainer.global_step}")


class _Run:
    """What lives through all phases of a run: module, callbacks and loggers."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        start: Start,
        module: LanguageModule,
        weights: Pretrained | None,
        progress: Progress,
        began: float,
        is_control: bool,
    ) -> None:
        self.config, self.corpus, self.start, self.module = config, corpus, start, module
        self.shape: Any = None
        run, phases, ranks = config.trainer, phases_of(config), current_ranks()
        self.phases, directory = phases, Path(config.run_dir)
        self.token_files = _token_files(start, weights, corpus)
        self.loggers = make_loggers(config)
        self.user_callbacks = make_callbacks(config.callbacks)
        permanent = kept_steps(config)
        self.metrics = Metrics(phases, epochs_read(corpus, phases), progress, peak_of_ranks(config))
        self.writer = Writer(
            directory / "checkpoints", run.keep_checkpoints, run.keep_every, permanent
        )
        self.saving = Saving(
            self.writer,
            run.checkpoint_every,
            run.checkpoint_minutes,
            permanent,
            self.state,
            self.metrics,
        )
        rows = run.batch_size // (run.accumulation(ranks.world_size) * ranks.world_size)
        self.change = PhaseChange(
            phases, partial(effect_probe, corpus, rows), self.saving, self.metrics
        )
        deadline = None
        if run.max_time is not None:
            hours, minutes, seconds = map(int, run.max_time.split(":"))
            deadline = began + 3600 * hours + 60 * minutes + seconds
        self.stopping = Stopping(self.saving, run.max_steps, deadline)
        self.monitors = Monitors(config, corpus, ranks, self.change, self.metrics)
        self.callbacks: list[L.Callback] = [
            Begin(self),
            self.change,
            *self.user_callbacks,
            self.monitors,
            self.metrics,
            self.saving,
            self.stopping,
        ]
        if not is_control:
            self.callbacks.append(Divergence(phases, directory / "checkpoints"))

    @contextmanager
    def saving_and_listening(self) -> Iterator[None]:
        """Handle signals, also between phases; at the end wait for the checkpoint being written."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.stopping.listen()
        try:
            yield
        finally:
            self.writer.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def state(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the contents of ``state.json``; all ranks call this together."""
        step, model, corpus = trainer.global_step, self.module.model, self.corpus
        phase = phase_before(self.phases, step)
        return {
            "step": step,
            "tokens": phase.tokens_at(step),
            "model": asdict(model.config),
            "layout": model.layout.to_dict(),
            "tokenizer": corpus.tokenizer.to_str(),
            "end_of_text": corpus.end_of_text,
            "token_files": self.token_files,
            "config": json.loads(json.dumps(asdict(self.config))),
            "versions": versions(),
            "data": data_fingerprints(corpus, phase),
            "tally": self.module.tally.state(),
            **self.metrics.state_dict(),
            **self.change.state_dict(),
            **self.monitors.state_dict(),
            "user_callbacks": {c.state_key: c.state_dict() for c in self.user_callbacks},
        }

    def restore(self, trainer: L.Trainer, checkpoint: Path) -> None:
        """Restore a checkpoint's weights, optimizer, counters and callbacks."""
        state = self.start.state
        restore(self.module.model, trainer.optimizers[0], checkpoint)
        self.module.tally.load(state["tally"], self.module.device)
        for callback in (self.metrics, self.change, self.monitors):
            callback.load_state_dict(state)
        for user_callback in self.user_callbacks:
            if (values := state["user_callbacks"].get(user_callback.state_key)) is not None:
                user_callback.load_state_dict(values)


class Begin(L.Callback):
    """Sets the number of updates done; in the first phase it restores the checkpoint.

    It is the first callback, so that all others start from the restored run. The data loader begins
    at the right step, so Lightning's loops need no other state.
    """

    def __init__(self, run: _Run) -> None:
        self.run, self.steps = run, run.start.step
        self.checkpoint = run.start.checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore after model and optimizer are on their devices."""
        if self.checkpoint is not None:
            self.run.restore(trainer, self.checkpoint)
            self.checkpoint = None
        # Lightning has no public way to begin at a step without a checkpoint of its own.
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the updates done, for the next phase."""
        self.steps = trainer.global_step


def _token_files(start: Start, weights: Pretrained | None, corpus: Corpus) -> dict[str, str]:
    """Return the files about tokens of the published model in which training began, if any.

    None of a model with another tokenizer, whose token ids are others.
    """
    if weights is None:
        return start.state.get("token_files", {})
    files, theirs = weights.token_files(), weights.tokenizer
    if theirs is not None and not same_tokens(theirs, corpus.tokenizer):
        return {}
    return dict(files)
