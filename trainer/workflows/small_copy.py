"""A small copy of a run: the same kinds of everything, in a model that trains in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.data.config import DataConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.runs.config import LoggerConfig, RunConfig, TrainerConfig

STEPS, DROP, EVERY, LENGTH = 24, 12, 4, 128
"""Steps of the copy, the one it drops at, those between checkpoints, and tokens of a sequence."""


def shrink(config: RunConfig, directory: Path) -> RunConfig:
    """The same kinds of everything, in a model and for a number of steps that take seconds.

    Text is the built-in one, and nothing is compiled, evaluated or sent to a dashboard; encodings,
    their layout, QK-norm, the drop, optimizer, schedules, precision and strategy stay.
    """
    C = min(config.data.sequence_length, LENGTH)
    windows = [w and min(w, C) for w in config.positional.windows]
    depth = min(config.model.num_hidden_layers, max(2, len(config.positional.layers)))
    drop = config.drop
    if config.drop_step is not None:
        layers = drop.layers and sorted({min(max(i, -depth), depth - 1) for i in drop.layers})
        warmup = replace(drop.schedule, warmup_steps=min(drop.schedule.warmup_steps, 2))
        drop = replace(drop, at=DROP, at_tokens=None, layers=layers, schedule=warmup)
        drop = replace(drop, effect_sequences=4)
    return replace(
        config,
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
        schedule=replace(config.schedule, warmup_steps=min(config.schedule.warmup_steps, 2)),
        drop=drop,
        trainer=TrainerConfig(
            max_steps=STEPS,
            batch_size=8,
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
