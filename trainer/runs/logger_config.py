"""Dashboards of a run."""

from __future__ import annotations

from trainer.common.fields import OptionalText, configuration


@configuration
class LoggerConfig:
    """Where metrics go besides ``metrics.csv``."""

    wandb: bool = False
    """Log to Weights & Biases; offline without a key or connection."""
    project: str = "unrope"
    """Project at Weights & Biases."""
    entity: OptionalText = None
    """Team at Weights & Biases; null: the user's own."""
    offline: bool = False
    """Log offline in any case; `wandb sync` sends it later."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
