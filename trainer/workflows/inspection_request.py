"""What ``inspect`` is asked for."""

from __future__ import annotations

from dataclasses import field

from trainer.common.errors import Problem
from trainer.common.fields import Count, OptionalText, configuration


@configuration
class InspectionRequest:
    """What the inspect command is asked for."""

    checkpoint: OptionalText = None
    """A run directory or a checkpoint in it."""
    step: Count = 1
    """Step of the run, from 1."""
    samples: Count = 2
    """Samples of the step to show, from its first on."""
    characters: Count = 400
    """Characters of each sample to show."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register text sources of your own."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        if self.checkpoint:
            return []
        return [Problem("checkpoint", "give a run directory, checkpoint=PATH.")]
