"""The learning rate as a pure function of the step in a phase; also the ``schedule`` group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.common.errors import Problem


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate of one phase, as a multiple of the optimizer's learning rates.

    Warm-up is linear from 0 to ``peak`` over ``warmup_steps``. ``cosine`` then falls to
    ``final`` * peak at the end, ``wsd`` stays and falls linearly to it over the last
    ``decay_fraction`` of the phase, ``constant`` stays.
    """

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    peak: float = 1.0
    warmup_steps: int = 0
    final: float = 0.1
    decay_fraction: float = 0.2

    def problems(self, key: str) -> list[Problem]:
        """What is impossible, one sentence each; ``key`` is where the group stands."""
        found = []
        if self.peak <= 0:
            found.append(Problem(f"{key}.peak", f"expected a positive number, got {self.peak}."))
        if self.warmup_steps < 0:
            found.append(
                Problem(f"{key}.warmup_steps", f"expected 0 or more, got {self.warmup_steps}.")
            )
        found += [
            Problem(f"{key}.{name}", f"expected a fraction from 0 to 1, got {value}.")
            for name in ("final", "decay_fraction")
            if not 0 <= (value := getattr(self, name)) <= 1
        ]
        return found

    def factor(self, step: int, length: int) -> float:
        """Multiple of the base learning rate for update number ``step`` (from 0) of ``length``."""
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
