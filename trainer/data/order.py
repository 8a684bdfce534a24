"""The order of samples and their randomness, as pure functions of (seed, counter).

Sample number ``counter`` is the same whatever came before it, however samples are batched, and on
however many workers and ranks: resuming is starting to count elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> Integers:
    return np.random.default_rng((seed, epoch)).permutation(size)


def sample_indices(seed: int, counters: Integers, size: int) -> Integers:
    """Which of ``size`` items the samples ``counters`` are: every item once an epoch, shuffled anew
    in each."""
    epochs, places = np.divmod(counters, size)
    indices = np.empty_like(counters)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = _permutation(seed, int(epoch), size)[places[chosen]]
    return indices


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection that scatters bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, counters: Integers, draws: int) -> NDArray[np.float64]:
    """``[len(counters), draws]`` numbers in [0, 1); row i depends on seed and counters[i] alone."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        key = _mix(np.asarray(seed, np.uint64) * _GOLDEN + _GOLDEN)
        rows = _mix(counters.astype(np.uint64) * _GOLDEN + key)
        columns = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(rows[:, None] + columns)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
