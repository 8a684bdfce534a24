"""Timeouts of ranks waiting for each other."""

from __future__ import annotations

from trainer.common.fields import Positive, configuration


@configuration
class TimeoutConfig:
    """Timeouts of ranks waiting for each other, in seconds."""

    start: Positive = 1800.0
    """Seconds until the first step is done: to meet, read weights and compile."""
    collective: Positive = 600.0
    """Seconds in a collective of training, after the first step."""
    one_rank: Positive = 7200.0
    """Seconds for what one rank does alone: checks, checksums, the last files of a checkpoint."""
