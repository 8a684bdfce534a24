"""Configurations of an experiment, the run and its controls, and what they must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from trainer.common.errors import UserError
from trainer.config import MAIN, RunConfig, SourceConfig, StrategyConfig
from trainer.runs.directory import plain
from trainer.runs.parsing import control_config


def arms_of(config: RunConfig, weights: bool = True) -> dict[str, RunConfig]:
    """Return the configurations of the run, first and as ``main``, and of its controls by name.

    ``weights``: whether the weights that they begin with are available; otherwise the configured
    shape is used.
    """
    controls = {name: control_config(plain(config), name, weights) for name in config.controls}
    return {MAIN: config, **controls}


def check_arms(arms: Mapping[str, RunConfig]) -> None:
    """Check that controls share what they must with their run.

    All arms train in the same processes, one after the other, and read the run's text; a control
    may omit texts of a mixture and weight them differently. A table is for one training length.

    Raises:
        UserError: names the first control that does not fit.
    """
    run, texts = arms[MAIN], _texts_of(arms[MAIN])
    for name, arm in arms.items():
        key = f"controls.{name}"
        if arm.training_length != run.training_length:
            raise UserError(
                f"{key}: trains on {arm.training_length} tokens, the run on {run.training_length}"
            )
        if not _texts_of(arm).items() <= texts.items() or arm.tokenizer != run.tokenizer:
            raise UserError(f"{key}.data: a control reads the texts and tokens of its run")
        if (arm.strategy.name == "single") != (run.strategy.name == "single"):
            raise UserError(f"{key}.strategy: a control trains in the processes of its run")


def _texts_of(config: RunConfig) -> dict[str, str]:
    """Return the keys that decide on each text of a run, by the name of the text."""
    keys = [*(key.name for key in fields(SourceConfig)), "prepared"]
    texts = config.data.texts.items()
    return {name: repr([getattr(text, key) for key in keys]) for name, (text, _) in texts}


def check_spread(config: RunConfig, processes: int, on_a_node: int) -> None:
    """Check that the batches and shards of a run divide among its processes.

    Raises:
        UserError: they do not.
    """
    run = config.trainer
    micro = run.micro_batch_size or max(run.batch_size // processes, 1)
    if run.batch_size % (processes * micro):
        raise UserError(
            f"trainer.batch_size: {run.batch_size} sequences do not divide into micro-batches of "
            f"{micro} on {processes} ranks"
        )
    size = shard_size(config.strategy, processes, on_a_node)
    if config.strategy.name == "hsdp" and processes % size:
        raise UserError(f"strategy.shard_size: {size} does not divide {processes} ranks")


def shard_size(config: StrategyConfig, processes: int, on_a_node: int) -> int:
    """Return the number of ranks that share one copy of the parameters."""
    if config.name == "hsdp":
        return config.shard_size or on_a_node
    return processes
