"""One stretch of a run in Lightning: phases that read batches of one size and length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from trainer.common.errors import PreemptedError, UserError
from trainer.common.progress import Progress
from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch, held_out_windows
from trainer.data.tokenizer import vocabulary_size
from trainer.interchange.pretrained import Pretrained
from trainer.model.backends import cudnn_attention
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout
from trainer.runs.checkpoint_files import damage_together
from trainer.runs.checkpoints import check_same_model, description
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.phases import (
    Phase,
    kept_steps,
    phase_at,
    phase_before,
    phases_of,
    stretch_end,
    with_ends,
)
from trainer.runs.ranks import Ranks, all_gather, current_ranks, on_rank_zero
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
from trainer.training.callbacks.benchmarks import Benchmarks
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
from trainer.training.callbacks.until import Until
from trainer.training.data_module import TrainingData
from trainer.training.lightning_trainer import make_trainer
from trainer.training.loggers import close, other_loggers
from trainer.training.metrics_logger import MetricsFile
from trainer.training.module import LanguageModule, make_decoder
from trainer.training.strategy import releasing
from trainer.training.user_callbacks import states_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Result of a stretch.

    Holds its last ``step``, the steps of phases that ended early, the effects of changes so far,
    the steps between which the run diverged, and the signal or limit that asked it to stop in its
    last step.
    """

    step: int
    ends: dict[str, int]
    effects: dict[str, dict[str, Any]]
    broken: tuple[int, int] | None
    asked: str | None


@dataclass(frozen=True)
class Around:
    """Context that a stretch gets from its process: its start time ``began`` (seconds since the
    epoch), the user's callbacks ``own``, and further ones."""

    began: float
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
        skips: pairs (step, samples) skipped from that step on; None: those of the checkpoint.
        around: context from the process.

    Raises:
        UserError: the checkpoint does not fit the run, the last one cannot be written, or the
            backend cannot run here.
        PreemptedError: the run was asked to stop, and has.
    """
    ranks, run_dir = current_ranks(), Path(config.run_dir)
    phases = phases_of(config)
    phase, end = phase_at(phases, start.step), stretch_end(phases, start.step)
    # The run with this stretch's lengths, sizes and end.
    here = replace(phase.config, trainer=replace(phase.config.trainer, max_steps=end))
    torch.manual_seed(config.seed + ranks.rank)
    model, weights = _decoder(config, corpus, start, ranks)
    skips = start.state.get("skips", []) if skips is None else skips
    ends = dict(start.state.get("ends", {}))
    module = LanguageModule(config, model, ranks, weights, start.checkpoint is not None)
    title = f"Training {label(config)}"
    if config.phases:
        title += ", " + " and ".join(p.name for p in phases if phase.start <= p.start < end)
    with Progress(title, end, here.tokens_per_step, silent=not ranks.is_rank_zero) as progress:
        metrics = Metrics(here, ranks, progress, epochs_read(corpus, phases, skips))
        loggers = [MetricsFile(run_dir / "metrics.csv"), *other_loggers(config)]

        def run_state(trainer: L.Trainer) -> dict[str, Any]:
            read = phase_before(phases, trainer.global_step)
            now = ends | ({} if until.ended is None else {phase.name: until.ended})
            ended = with_ends(config, now)
            return {
                **description(ended, model, corpus.tokenizer.to_str(), trainer.global_step),
                "data": data_fingerprints(corpus, read),
                "numerics": NUMERICS[config.trainer.precision],
                "skips": skips,
                "ends": now,
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
        until = Until(phase, transitions, checkpointing)
        with_state = [metrics, transitions, *monitors, *([until] if phase.until else [])]
        preemption = Preemption(config, checkpointing, around.began)
        rewind = Rewind(here)
        trainer = make_trainer(
            here,
            ranks,
            loggers,
            # The order matters: change, end, measure, log, save.
            [
                Resume(start.checkpoint, start.state, with_state, around.own),
                transitions,
                *around.own,
                until,
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
        backend = module.choose_attention(here, trainer.strategy.root_device.type)
        count = sum(p.numel() for p in model.parameters())
        kind = f"attention backend {backend.name} ({backend.why})"
        log.info("%s: %s parameters, %s", title, f"{count:,}", kind)
        to_train = start.step < end
        if to_train:
            first = partial(_first_sample, phases, skips)
            data = TrainingData(samples_of(corpus, phase), here, ranks, start.step, first)
            with releasing(module, trainer.strategy), cudnn_attention(backend.cudnn):
                trainer.fit(module, datamodule=data)
            certificate = module.certificate.state()["samples"]
            log.info("%s: what was read has the certificate %s", title, certificate)
        else:
            transitions.load_state_dict(callback_states(start.state)["Transitions"])
        on_rank_zero(partial(close, loggers))  # no other rank exits before rank 0
        if preemption.reason is not None:
            raise PreemptedError(
                f"Stopped after step {trainer.global_step} ({preemption.reason}), checkpoint saved."
            )
        if until.ended is not None:
            end, ends = trainer.global_step, ends | {phase.name: until.ended}
        if to_train and trainer.global_step < end and not rewind.broken:
            raise UserError.at(
                "callbacks",
                f"one of them stopped the run after step {trainer.global_step} of "
                f"{config.trainer.max_steps}; leave it out, and the same command goes on from the "
                "newest checkpoint.",
            )
    return Trained(end, ends, transitions.effects, rewind.broken, preemption.asked)


def _decoder(
    config: RunConfig, corpus: Corpus, start: Start, ranks: Ranks
) -> tuple[Decoder, Pretrained | None]:
    """Create the decoder with its layout at the start, without weights.

    Also returns the source of trained weights, if the run begins with them.
    """
    weights = starting_weights(config.model) if start.checkpoint is None else None
    if weights is not None and len(found := set(all_gather(weights.name))) > 1:
        raise UserError.at(
            "model.from_run",
            f"ranks found different checkpoints ({', '.join(sorted(found))}); name one, since the "
            "run still trains.",
        )
    if weights is not None and config.model.from_run is not None:
        path = Path(weights.name)
        if (wrong := damage_together(path)) is not None:
            raise UserError.at("model.from_run", f"{path.name!r} is damaged: {wrong}.")
    model = make_decoder(config, vocabulary_size(corpus.tokenizer), weights)
    if start.checkpoint is not None:
        check_same_model(start.state, model, start.checkpoint.name)
        if ranks.is_rank_zero:
            say_other_numerics(start.state, config)
        on_rank_zero(lambda: check_same_data(start.state, corpus, config))
        model.layout = Layout.from_dict(start.state["layout"])
    return model, weights


def _first_sample(phases: Sequence[Phase], skips: Sequence[Sequence[int]], step: int) -> int:
    return phase_at(phases, step).first_sample(step, skips)


def _monitors(
    config: RunConfig, corpus: Corpus, ranks: Ranks, transitions: Transitions, metrics: Metrics
) -> list[L.Callback]:
    """Create the callbacks that measure the model during training."""
    found: list[L.Callback] = []
    if config.monitor.lengths_every is not None:
        found.append(Lengths(config, corpus, ranks, transitions, metrics.add))
    if config.monitor.benchmarks.enabled:
        found.append(Benchmarks(config, corpus, ranks, transitions, metrics.add))
    if config.monitor.probe_every is not None:
        found.append(Probe(config, corpus, transitions, metrics.add))
    return found


def _guards(config: RunConfig, ranks: Ranks) -> list[L.Callback]:
    """Create the callbacks that supervise the process."""
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
    """Return the fixed batch of validation text on which the effect of a change is measured."""
    count, length = phase.config.drop.effect_sequences, phase.config.data.sequence_length
    windows = held_out_windows(corpus.validation, count, length)
    return as_batch(windows, corpus.end_of_text, np.ones(windows.shape, dtype=np.float32))
