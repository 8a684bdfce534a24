"""A certificate of what was read: the sum of a hash of every sample, modulo 2^64.

Sums do not depend on order, on the number of ranks or on accumulation, so that two runs, or the
two halves of one, can be shown to have read the same tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import _GOLDEN, Integers, _mix


def sample_hashes(tokens: Integers) -> NDArray[np.uint64]:
    """64 bits of every row of ``[B, T]`` tokens, which change with any token and its place."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        places = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64) * _GOLDEN
        return _mix(_mix(tokens.astype(np.uint64) * _GOLDEN + places).sum(axis=1))


def as_text(total: int) -> str:
    """Sixteen hexadecimal digits of a sum, which may be a signed number of 64 bits."""
    return f"{total % 2**64:016x}"
