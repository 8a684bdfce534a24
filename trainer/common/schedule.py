"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

Schedule = Callable[[int], float]
"""Maps the number of updates done to a factor on the learning rates of the next one."""


def schedule(
    steps: int,
    name: Literal["cosine", "wsd", "constant"] = "cosine",
    *,
    warmup: int = 0,
    peak: float = 1.0,
    final: float = 0.1,
    decay_fraction: float = 0.2,
) -> Schedule:
    """Return a schedule over ``steps`` updates: linear ``warmup``, then the shape ``name``.

    ``cosine`` falls from ``peak`` to ``peak * final`` over the rest; ``wsd`` stays at the peak and
    falls linearly over the last ``decay_fraction``; ``constant`` stays.
    """
    return partial(_factor, steps, name, warmup, peak, final, decay_fraction)


def _factor(
    steps: int,
    name: str,
    warmup: int,
    peak: float,
    final: float,
    decay_fraction: float,
    step: int,
) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    if name == "constant":
        return peak
    start = warmup
    if name == "wsd":
        start = max(start, round(steps * (1 - decay_fraction)))
    progress = min(max((step - start) / max(steps - start, 1), 0.0), 1.0)
    fall = progress if name == "wsd" else (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - final) * fall)
