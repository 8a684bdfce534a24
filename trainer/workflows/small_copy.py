"""Small copy of a run: the same features, in a model that trains in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from trainer.data.config import DataConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.recalibration.config import ChangeConfig, ScheduleConfig
from trainer.runs.config import RunConfig
from trainer.runs.logger_config import LoggerConfig
from trainer.runs.phase_config import PhaseConfig
from trainer.runs.training_config import TrainerConfig

STEPS, DROP, EVERY, LENGTH, BATCH = 24, 12, 4, 128, 8
"""Steps of the copy, the one it drops at, those between checkpoints, tokens of a sequence and
sequences of a step."""
LONGER = 4
"""Most times that the sequences of a phase get longer."""

Change = TypeVar("Change", bound=ChangeConfig)


def shrink(config: RunConfig, directory: Path) -> RunConfig:
    """Return a copy with the same features, in a model and for a number of steps that take seconds.

    The text is the built-in one, and nothing is compiled, evaluated or sent to a dashboard.
    Encodings, layout, QK-norm, drop, phases, optimizer, schedules, precision and strategy stay.
    """
    C = min(config.data.sequence_length, LENGTH)
    windows = [w and min(w, C) for w in config.positional.windows]
    depth = min(config.model.num_hidden_layers, max(2, len(config.positional.layers)))
    drop = replace(config.drop, effect_sequences=4)
    if config.drop_step is not None and not config.phases:
        drop = replace(_shrunk(drop, depth, STEPS - DROP), at=DROP, at_tokens=None)
        drop = replace(drop, schedule=_quick(drop.schedule))
    count = max(len(config.phases), 1)
    steps = [STEPS // count + (index < STEPS % count) for index in range(count)]
    parts = zip(config.phases.items(), steps, strict=False)
    return replace(
        config,
        phases={name: _phase(config, phase, C, depth, n) for (name, phase), n in parts},
        run_dir=str(directory),
        overwrite=False,
        controls={},
        model=replace(
            config.model,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=depth,
            head_dim=min(config.model.head_size, 32),
            vocab_size=None,
            from_pretrained=None,
            from_run=None,
            attention_backend="auto",
        ),
        positional=replace(config.positional, windows=windows),
        data=DataConfig(
            sequence_length=C,
            document_mask=config.data.document_mask,
            needles=config.data.needles,
            num_workers=min(config.data.num_workers, 1),
            cache_dir=config.data.cache_dir,
        ),
        tokenizer=replace(config.tokenizer, path=None, vocab_size=512),
        schedule=_quick(config.schedule),
        drop=drop,
        trainer=TrainerConfig(
            max_steps=STEPS,
            batch_size=BATCH,
            micro_batch_size=2,
            precision=config.trainer.precision,
            accelerator="cpu",
            threads=1,
            gradient_clip=config.trainer.gradient_clip,
            z_loss=config.trainer.z_loss,
            log_every=1,
            checkpoint_every=EVERY,
            keep_checkpoints=3,
        ),
        strategy=replace(config.strategy, shard_size=None, cpu_offload=False),
        logger=LoggerConfig(),
        evaluation=EvaluationConfig(enabled=False),
    )


def _phase(
    config: RunConfig, phase: PhaseConfig, longest: int, depth: int, steps: int
) -> PhaseConfig:
    """Return a phase of the same kind with ``steps`` steps."""
    length, size = phase.sequence_length, phase.batch_size
    if length is not None:
        times = length / config.data.sequence_length
        length = max(round(longest * min(times, LONGER)), 2)
    if size is not None:
        more, fewer = size > config.trainer.batch_size, size < config.trainer.batch_size
        size = 2 * BATCH if more else BATCH // 2 if fewer else BATCH
    return replace(
        phase,
        steps=steps,
        tokens=None,
        sequence_length=length,
        batch_size=size,
        micro_batch_size=None,
        weights=None,
        schedule=phase.schedule and _quick(phase.schedule),
        drop=phase.drop and _shrunk(phase.drop, depth, steps),
        log_every=None,
        until=None,  # it would end the run at another step
    )


def _shrunk(change: Change, depth: int, steps: int) -> Change:
    """Return a drop of layers that the copy has, within ``steps`` steps."""
    layers = change.layers and sorted({min(max(i, -depth), depth - 1) for i in change.layers})
    return replace(change, layers=layers, anneal_steps=min(change.anneal_steps, steps // 2))


def _quick(schedule: ScheduleConfig) -> ScheduleConfig:
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, 2))
