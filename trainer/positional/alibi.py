"""ALiBi (Press, Smith and Lewis 2021, Sec. 3): slopes of the linear bias on attention scores."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope a query head.

    For a power of two: 2^(-8/heads), 2^(-16/heads), ..., 2^-8. Otherwise the slopes of the power of
    two below, then every second slope of the power of two above, as in the published code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return tuple(slopes + between[: heads - power])
