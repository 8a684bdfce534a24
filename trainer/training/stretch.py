"""One stretch of a run in Lightning: phases that read batches of one size and length."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch, held_out_windows
from trainer.data.tokenizer import vocabulary_size
from trainer.errors import PreemptedError, UserError
from trainer.positional.layout import Layout
from trainer.report.progress import Progress
from trainer.runs.checkpoints import check_same_model, description
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.phases import Phase, kept_steps, phase_at, phase_before, phases_of, stretch_end
from trainer.runs.ranks import Ranks, current_ranks, device_of, device_type, on_rank_zero
from trainer.runs.saved_state import callback_states
from trainer.runs.starting_point import (
    NUMERICS,
    Start,
    check_same_data,
    data_fingerprints,
    epochs_read,
    samples_of,
    say_other_numerics,
)
from trainer.runs.starting_weights import starting_weights
from trainer.training.callbacks.checkpointing import Checkpointing
from trainer.training.callbacks.garbage import GarbageCollection
from trainer.training.callbacks.lengths import Lengths
from trainer.training.callbacks.limits import Limits
from trainer.training.callbacks.metrics import Metrics
from trainer.training.callbacks.preemption import Preemption
from trainer.training.callbacks.probe import Probe
from trainer.training.callbacks.profiling import Profiling
from trainer.training.callbacks.resume import Resume
from trainer.training.callbacks.stability import Rewind, Watchdog
from trainer.training.callbacks.timed_checkpoints import TimedCheckpoints
from trainer.training.callbacks.transitions import Transitions
from trainer.training.data_module import TrainingData
from trainer.training.lightning_internals import disable_sigterm_broadcast
from trainer.training.loggers import close, other_loggers
from trainer.training.metrics_logger import MetricsFile
from trainer.training.module import LanguageModule, make_decoder
from trainer.training.strategy import lightning_strategy
from trainer.training.user_callbacks import states_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """What came of a stretch: its last ``step``, what the phases until then changed, the steps
    between which the run diverged, and who asked it to stop in its very last step."""

    step: int
    effects: dict[str, dict[str, Any]]
    broken: tuple[int, int] | None
    asked: str | None


@dataclass(frozen=True)
class Around:
    """What a stretch has from the process that trains it: when that ``began`` (seconds since the
    epoch), who ``asked`` it to stop, the user's ``own`` callbacks and others."""

    began: float
    asked: str | None
    own: Sequence[L.Callback]
    callbacks: Sequence[L.Callback]


def train_stretch(
    config: RunConfig,
    corpus: Corpus,
    start: Start,
    skips: list[list[int]] | None,
    around: Around,
) -> Trained:
    """Train from ``start`` to the end of the stretch that its next step belongs to.

    Args:
        config: the run.
        corpus: its texts.
        start: its beginning, or a checkpoint.
        skips: pairs (step, samples) left out from that step on; None: those of the checkpoint.
        around: of the process.

    Raises:
        UserError: the checkpoint does not fit the run, the last one cannot be written, or the
            backend cannot run here.
        PreemptedError: the run was asked to stop, and has.
    """
    ranks, run_dir = current_ranks(), Path(config.run_dir)
    phases = phases_of(config)
    phase, end = phase_at(phases, start.step), stretch_end(phases, start.step)
    # The run as this stretch trains it: its lengths and sizes, and its end.
    here = replace(phase.config, trainer=replace(phase.config.trainer, max_steps=end))
    torch.manual_seed(config.seed + ranks.rank)
    weights = starting_weights(config.model) if start.checkpoint is None else None
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if start.checkpoint is not None:
        check_same_model(start.state, model, start.checkpoint.name)
        if ranks.is_rank_zero:
            say_other_numerics(start.state, config)
        on_rank_zero(lambda: check_same_data(start.state, corpus, config))
        model.layout = Layout.from_dict(start.state["layout"])
    skips = start.state.get("skips", []) if skips is None else skips
    module = LanguageModule(config, model, ranks, weights, start.checkpoint is not None)
    title = f"Training {label(config)}"
    if config.phases:
        title += f", {phase.name}"
    with Progress(title, end, here.tokens_per_step, silent=not ranks.is_rank_zero) as progress:
        metrics = Metrics(here, ranks, progress, epochs_read(corpus, phases, skips))
        loggers = [MetricsFile(run_dir / "metrics.csv"), *other_loggers(config)]

        def run_state(trainer: L.Trainer) -> dict[str, Any]:
            read = phase_before(phases, trainer.global_step)
            return {
                **description(config, model, corpus.tokenizer.to_str(), trainer.global_step),
                "data": data_fingerprints(corpus, read),
                "numerics": NUMERICS[config.trainer.precision],
                "skips": skips,
                "world_size": ranks.world_size,
                "loss": metrics.last_loss,
                "tally": module.tally.state(),
                "certificate": module.certificate.state(),
                "callbacks": {type(c).__name__: c.state_dict() for c in with_state},
                "user_callbacks": states_of(around.own),
                "loggers": {type(x).__name__: x.version for x in loggers if x.version},
            }

        kept = kept_steps(config)
        checkpointing = Checkpointing(here, run_dir / "checkpoints", run_state, kept)
        transitions = Transitions(
            phases, partial(effect_batch, corpus), checkpointing.before_drop, metrics.add
        )
        monitors = _monitors(config, corpus, ranks, transitions, metrics)
        with_state = metrics, transitions, *monitors
        preemption = Preemption(config, checkpointing, around.began, around.asked)
        rewind = Rewind(here)
        trainer = make_trainer(
            here,
            ranks,
            loggers,
            # The order matters: changed, then measured, then logged, then saved.
            [
                Resume(start.checkpoint, start.state, with_state, around.own),
                transitions,
                *around.own,
                *monitors,
                metrics,
                checkpointing,
                TimedCheckpoints(config, ranks, checkpointing),
                rewind,
                preemption,
                *_guards(here, ranks),
                *around.callbacks,
            ],
        )
        backend = model.use_backend(
            config.model.attention_backend,
            trainer.strategy.root_device.type,
            documents=config.data.document_mask,
            half=config.trainer.precision == "bf16",
        )
        count = sum(p.numel() for p in model.parameters())
        log.info("%s: %s parameters, attention backend %s (%s)", title, f"{count:,}", *backend)
        to_train = start.step < end
        if to_train:
            first = partial(_first_sample, phases, skips)
            data = TrainingData(samples_of(corpus, phase), here, ranks, start.step, first)
            trainer.fit(module, datamodule=data)
            certificate = module.certificate.state()["samples"]
            log.info("%s: what was read has the certificate %s", title, certificate)
        else:
            transitions.load_state_dict(callback_states(start.state)["Transitions"])
        on_rank_zero(partial(close, loggers))  # no other rank ends before, which may end the first
        if preemption.reason is not None:
            raise PreemptedError(
                f"Stopped after step {trainer.global_step} ({preemption.reason}), checkpoint saved."
            )
        if to_train and trainer.global_step < end and not rewind.broken:
            raise UserError(
                f"callbacks: one of them stopped the run after step {trainer.global_step} of "
                f"{config.trainer.max_steps}; leave it out, and the same command goes on from the "
                "newest checkpoint."
            )
    return Trained(end, transitions.effects, rewind.broken, preemption.asked)


def _first_sample(phases: Sequence[Phase], skips: Sequence[Sequence[int]], step: int) -> int:
    return phase_at(phases, step).first_sample(step, skips)


def _monitors(
    config: RunConfig, corpus: Corpus, ranks: Ranks, transitions: Transitions, metrics: Metrics
) -> list[L.Callback]:
    """What measures the model while it trains."""
    found: list[L.Callback] = []
    if config.monitor.lengths_every is not None:
        found.append(Lengths(config, corpus, ranks, transitions, metrics.add))
    if config.monitor.probe_every is not None:
        found.append(Probe(config, corpus, transitions, metrics.add))
    return found


def _guards(config: RunConfig, ranks: Ranks) -> list[L.Callback]:
    """What looks after the process."""
    found: list[L.Callback] = [
        Watchdog(config, Path(config.run_dir), ranks.is_rank_zero),
        Limits(config),
        GarbageCollection(config.trainer.gc_every),
    ]
    if config.trainer.profile_steps:
        first, last = config.trainer.profile_steps
        found.append(Profiling(first, last, Path(config.run_dir) / "profile", ranks.rank))
    return found


def effect_batch(corpus: Corpus, phase: Phase) -> Batch:
    """The fixed validation batch on which the effect of a change is measured, plain text."""
    count, length = phase.config.drop.effect_sequences, phase.config.data.sequence_length
    windows = held_out_windows(corpus.validation, count, length)
    return as_batch(windows, corpus.end_of_text, np.ones(windows.shape, dtype=np.float32))


def make_trainer(
    config: RunConfig, ranks: Ranks, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Lightning's trainer, without its own checkpoints, progress bar and advice."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    run, single = config.trainer, config.strategy.name == "single"
    strategy = lightning_strategy(config, ranks)
    if isinstance(strategy, ParallelStrategy):
        # Of this list Lightning takes what stands at the local rank. Left to itself it expects to
        # see the GPUs of all processes of a machine.
        strategy.parallel_devices = [device_of(config, ranks)] * ranks.local_size
    trainer = L.Trainer(
        max_steps=run.max_steps,
        accelerator=device_type(config),
        devices=1,
        num_nodes=ranks.nodes,
        strategy=strategy,
        # Named, so that Lightning does not take to what it finds in a SLURM job.
        plugins=[LightningEnvironment() if single else TorchElasticEnvironment()],
        precision="32-true",  # of the weights; the decoder knows in which type it computes
        accumulate_grad_batches=run.accumulation(ranks.world_size),
        logger=loggers,
        log_every_n_steps=0,  # the Metrics callback logs, what others gave to log() too
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=config.run_dir,
    )
    disable_sigterm_broadcast(trainer)
    return trainer
