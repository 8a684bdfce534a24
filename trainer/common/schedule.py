"""Learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable
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
    start = max(warmup, round(steps * (1 - decay_fraction))) if name == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if name == "constant":
            return peak
        progress = min(max((step - start) / max(steps - start, 1), 0.0), 1.0)
        fall = progress if name == "wsd" else (1 - math.cos(math.pi * progress)) / 2
        return peak * (1 - (1 - final) * fall)

    return factor
