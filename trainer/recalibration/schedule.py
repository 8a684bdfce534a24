"""Learning rate as a pure function of the step within a phase; the ``schedule`` group."""

from __future__ import annotations

import math
from typing import Literal

from trainer.common.fields import Natural, Rate, Share, configuration


@configuration
class ScheduleConfig:
    """Learning rate of one phase, as a multiple of the optimizer's learning rates."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine (falls to the end), wsd (stays, then falls over the last
    decay_fraction), constant."""
    peak: Rate = 1.0
    """Factor on the optimizer's learning rates after the warm-up."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up from 0 to the peak."""
    final: Share = 0.1
    """Factor at the end, as a share of the peak."""
    decay_fraction: Share = 0.2
    """Share of the phase over which wsd falls."""

    def factor(self, step: int, length: int) -> float:
        """Return the factor on the base learning rate for update ``step`` of ``length``."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        start = self.warmup_steps
        if self.name == "wsd":
            start = max(start, round(length * (1 - self.decay_fraction)))
        progress = min(max((step - start) / max(length - start, 1), 0.0), 1.0)
        fall = progress if self.name == "wsd" else (1 - math.cos(math.pi * progress)) / 2
        return self.peak * (1 - (1 - self.final) * fall)
