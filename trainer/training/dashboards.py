"""Weights & Biases and TensorBoard: rows of metrics and results of an evaluation."""

import os
import secrets
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from trainer.common.files import write_atomically
from trainer.config import LoggerConfig
from trainer.runs.directory import read_metrics
from trainer.runs.phases import Run
from trainer.training.internals import remove_anonymous

LENGTH = "evaluation/length"
"""Name of the length in tokens in dashboards, against which scores are drawn."""


def check_dashboards(config: LoggerConfig) -> None:
    """Raise ImportError if a package of the configured dashboards is missing."""
    if config.wandb:
        import_module("wandb")
    if config.tensorboard:
        TensorBoardLogger("")


def dashboards(run: Run) -> list[Logger]:
    """Return the configured loggers besides ``metrics.csv``."""
    loggers: list[Logger] = []
    name = run.config.name
    config = run.config.logger
    if config.wandb:
        title = f"{name}/{run.directory.name}" if run.is_control else name
        loggers.append(_wandb(run.directory, title, name, config.offline))
    if config.tensorboard:
        loggers.append(TensorBoardLogger(run.directory, name="tensorboard", version=""))
    return loggers


@lru_cache
def _wandb(directory: Path, name: str, group: str, offline: bool) -> Logger:
    """Create a run's logger once: it stays open for results that are computed after training.

    Offline it begins with the rows of earlier processes: each process writes a directory of its own
    under the run's id, and `wandb sync` of the newest uploads the whole series.
    """
    path = directory / "wandb_id"
    if not path.exists():
        rank_zero_only(write_atomically)(path, secrets.token_hex(4))
    logger = WandbLogger(
        name=name,
        group=group,
        project=os.environ.get("WANDB_PROJECT", "unrope"),
        id=path.read_text() if path.exists() else None,
        # Offline there is nothing to resume, and some versions warn of it.
        resume=None if offline else "allow",
        mode="offline" if offline else None,
        save_dir=directory,
        reinit="create_new",  # the run's own stays open while its controls train
    )
    remove_anonymous(logger)
    if offline:
        for row in read_metrics(directory / "metrics.csv"):
            step = row.pop("step")
            logger.log_metrics(row, step=step)
    return logger


def log_results(run: Run, values: Mapping[int, Mapping[str, float]]) -> None:
    """Log an evaluation's ``values``, by length in tokens and name, to the dashboards."""
    for logger in dashboards(run):
        for length, row in values.items():
            step: int | None = length
            if isinstance(logger, WandbLogger):
                step = None
                for name in row:  # Lightning's `*` takes precedence over `evaluation/*`
                    logger.experiment.define_metric(name, step_metric=LENGTH)
            logger.log_metrics({LENGTH: length, **row}, step=step)
        logger.finalize("success")
