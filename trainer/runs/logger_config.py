"""Dashboards of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go besides ``metrics.csv``.

    ``wandb``: Weights & Biases, under ``project``; offline without a key or with ``offline``.
    ``tensorboard``: event files in the run directory.
    """

    wandb: bool = False
    project: str = "unrope"
    entity: str | None = None
    offline: bool = False
    tensorboard: bool = False
