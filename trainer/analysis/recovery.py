"""Recovery of the training loss after a drop (DroPE, Sec. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SMOOTH = 5
"""Logged losses that one mean is taken of."""


@dataclass(frozen=True)
class Recovery:
    """Losses in nats a token, means of up to five logged ones: right ``before`` the drop and at the
    ``end``. ``peak``: the largest single one after it. ``back``: the first step at which the mean
    of the last five since the drop is no larger than before it, if there is one."""

    before: float
    peak: float
    end: float
    back: int | None


def recovery(curve: Sequence[tuple[int, float]], drop_step: int) -> Recovery | None:
    """Read it off a loss curve.

    Args:
        curve: (step, loss) by step.
        drop_step: the last step before the drop.

    Returns:
        None where the curve has nothing before or nothing after it.
    """
    before = [loss for step, loss in curve if step <= drop_step]
    after = [(step, loss) for step, loss in curve if step > drop_step]
    if not before or not after:
        return None
    level = float(np.mean(before[-SMOOTH:]))
    losses = [loss for _, loss in after]
    means = [float(np.mean(losses[max(0, i - SMOOTH) : i])) for i in range(SMOOTH, len(losses) + 1)]
    steps = [step for step, _ in after][SMOOTH - 1 :]
    back = next((step for step, mean in zip(steps, means, strict=True) if mean <= level), None)
    return Recovery(level, max(losses), float(np.mean(losses[-SMOOTH:])), back)
