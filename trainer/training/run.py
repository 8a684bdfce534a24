"""One training run from start or checkpoint to its last step."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
from trainer.data.dataset import (
    Batch,
    TrainingSamples,
    as_batch,
    first_sample,
    held_out_windows,
)
from trainer.data.tokenizer import vocabulary_size
from trainer.errors import PreemptedError, UserError
from trainer.interchange.pretrained import read_pretrained
from trainer.positional.layout import Layout
from trainer.report.progress import Progress
from trainer.runs.checkpoints import (
    check_same_model,
    description,
    step_name,
)
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.ranks import Ranks, current_ranks, device_of, device_type, on_rank_zero
from trainer.runs.starting_point import (
    NUMERICS,
    Start,
    check_same_data,
    data_fingerprints,
    rewind_run,
    say_other_numerics,
    starting_point,
)
from trainer.training.callbacks.checkpointing import Checkpointing
from trainer.training.callbacks.drop import Drop
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
from trainer.training.data_module import TrainingData
from trainer.training.devices import numerics
from trainer.training.lightning_internals import disable_sigterm_broadcast
from trainer.training.loggers import close, other_loggers
from trainer.training.metrics_logger import MetricsFile
from trainer.training.module import LanguageModule, make_decoder
from trainer.training.strategy import lightning_strategy
from trainer.training.user_callbacks import make_callbacks, states_of

log = logging.getLogger(__name__)

MAX_REWINDS = 10
"""In one process; a run that diverges more often needs a person."""


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its last checkpoint, the ``effect`` of its drop (empty without one), and the
    seconds spent in this process."""

    checkpoint: Path
    effect: dict[str, Any]
    seconds: float


def train(
    config: RunConfig,
    corpus: Corpus,
    branch: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    user_callbacks: Sequence[L.Callback] | None = None,
) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` where there is one.

    Args:
        config: the run.
        corpus: its text.
        branch: where the run has no checkpoint yet, the checkpoint of another run to go on from,
            with that run's metrics up to it.
        callbacks: further Lightning callbacks.
        user_callbacks: those that ``config.callbacks`` names; None: made here. After the run has
            gone back to a checkpoint they are made anew.

    Raises:
        UserError: the checkpoint does not fit the run, none is sound, the last one cannot be
            written, or the backend cannot run here.
        PreemptedError: the run was asked to stop, and has.
    """
    began, skips = time.perf_counter(), None
    own = make_callbacks(config.callbacks) if user_callbacks is None else user_callbacks
    for _ in range(MAX_REWINDS):
        start = starting_point(config, branch)
        with numerics(config):
            effect, broken = _fit(config, corpus, start, skips, own, callbacks)
        if broken is None:
            path = Path(config.run_dir) / "checkpoints" / step_name(config.trainer.max_steps)
            return TrainedRun(path, effect, time.perf_counter() - began)
        skips = rewind_run(config, *broken)
        own = make_callbacks(config.callbacks)
    raise UserError(
        f"trainer.rewind_after: the run went back {MAX_REWINDS} times and diverges again; lower "
        "the learning rate, or look at the text."
    )


def _fit(
    config: RunConfig,
    corpus: Corpus,
    start: Start,
    skips: list[list[int]] | None,
    own: Sequence[L.Callback],
    callbacks: Sequence[L.Callback],
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    ranks, run_dir = current_ranks(), Path(config.run_dir)
    torch.manual_seed(config.seed + ranks.rank)
    given = config.model.from_pretrained
    pretrained = read_pretrained(given) if given and start.checkpoint is None else None
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), pretrained)
    if start.checkpoint is not None:
        check_same_model(start.state, model, start.checkpoint.name)
        if ranks.is_rank_zero:
            say_other_numerics(start.state, config)
        on_rank_zero(lambda: check_same_data(start.state, corpus, config))
        model.layout = Layout.from_dict(start.state["layout"])
    skips = start.state.get("skips", []) if skips is None else skips
    samples = TrainingSamples(corpus, config.data, config.seed)
    module = LanguageModule(config, model, ranks, pretrained, start.checkpoint is not None)
    title = f"Training {label(config)}"
    with Progress(
        title, config.trainer.max_steps, config.tokens_per_step, silent=not ranks.is_rank_zero
    ) as progress:
        metrics = Metrics(
            config,
            ranks,
            progress,
            lambda step: samples.epochs(first_sample(step, config.trainer.batch_size, skips)),
        )
        loggers = [MetricsFile(run_dir / "metrics.csv"), *other_loggers(config)]

        def run_state(trainer: L.Trainer) -> dict[str, Any]:
            return {
                **description(config, model, corpus.tokenizer.to_str(), trainer.global_step),
                "data": data_fingerprints(corpus, config),
                "numerics": NUMERICS[config.trainer.precision],
                "skips": skips,
                "world_size": ranks.world_size,
                "loss": metrics.last_loss,
                "tally": module.tally.state(),
                "certificate": module.certificate.state(),
                "callbacks": {type(c).__name__: c.state_dict() for c in with_state},
                "user_callbacks": states_of(own),
                "loggers": {type(x).__name__: x.version for x in loggers if x.version},
            }

        checkpointing = Checkpointing(config, run_dir / "checkpoints", run_state)
        drop = Drop(config, effect_batch(config, corpus), checkpointing.before_drop, metrics.add)
        monitors = _monitors(config, corpus, ranks, drop, metrics)
        with_state = metrics, drop, *monitors
        resume = Resume(start.checkpoint, start.state, with_state, own)
        preemption = Preemption(config, checkpointing, began=time.time())
        rewind = Rewind(config)
        trainer = make_trainer(
            config,
            ranks,
            loggers,
            # The order matters: changed, then measured, then logged, then saved.
            [
                resume,
                drop,
                *own,
                *monitors,
                metrics,
                checkpointing,
                TimedCheckpoints(config, ranks, checkpointing),
                rewind,
                preemption,
                *_around(config, ranks),
                *callbacks,
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
        to_train = start.step < config.trainer.max_steps
        if to_train:
            trainer.fit(module, datamodule=TrainingData(samples, config, ranks, start.step, skips))
            certificate = module.certificate.state()["samples"]
            log.info("%s: what was read has the certificate %s", title, certificate)
        else:
            drop.load_state_dict(start.state["callbacks"]["Drop"])
        on_rank_zero(partial(close, loggers))  # no other rank ends before, which may end the first
        if preemption.reason is not None:
            raise PreemptedError(
                f"Stopped after step {trainer.global_step} ({preemption.reason}), checkpoint saved."
            )
        if to_train and trainer.global_step < config.trainer.max_steps and not rewind.broken:
            raise UserError(
                f"callbacks: one of them stopped the run after step {trainer.global_step} of "
                f"{config.trainer.max_steps}; leave it out, and the same command goes on from the "
                "newest checkpoint."
            )
    return drop.effect, rewind.broken


def _monitors(
    config: RunConfig, corpus: Corpus, ranks: Ranks, drop: Drop, metrics: Metrics
) -> list[L.Callback]:
    """What measures the model while it trains."""
    found: list[L.Callback] = []
    if config.monitor.lengths_every is not None:
        found.append(Lengths(config, corpus, ranks, drop, metrics.add))
    if config.monitor.probe_every is not None:
        found.append(Probe(config, corpus, drop, metrics.add))
    return found


def _around(config: RunConfig, ranks: Ranks) -> list[L.Callback]:
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


def effect_batch(config: RunConfig, corpus: Corpus) -> Batch:
    """The fixed validation batch on which the drop's effect is measured, plain text."""
    windows = held_out_windows(
        corpus.validation, config.drop.effect_sequences, config.data.sequence_length
    )
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
