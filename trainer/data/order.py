"""Order of samples and their randomness, as pure functions of (seed, counter).

Sample ``counter`` does not depend on earlier samples, on the batch size, or on the number of
workers and ranks. No function here needs memory that grows with the number of samples.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.config import PERIOD

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

ROUNDS = 8
"""Rounds of the Feistel network. Four make a pseudorandom permutation of a large domain (Luby and
Rackoff 1988); small domains need more."""


def _mix(x: Words) -> Words:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(*numbers: int | Integers) -> Words:
    """Return 64 bits that depend on all the numbers and on their order."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        bits = np.asarray(0, np.uint64)
        for number in numbers:
            bits = _mix(bits + np.asarray(number).astype(np.uint64) * _GOLDEN + _GOLDEN)
        return bits


def permuted(numbers: Integers, size: int, key: Words) -> Integers:
    """Apply a permutation of 0 .. ``size`` - 1, chosen by ``key``, to ``numbers``.

    ``key`` is one key for all numbers or one per number. A Feistel network of two halves permutes
    the next power of four. Values of at least ``size`` pass through it again until they are smaller
    ("cycle walking", Black and Rogaway 2002).
    """
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    shift = np.uint64(half)
    low = np.uint64((1 << half) - 1)
    values = numbers.astype(np.uint64)
    chosen = np.broadcast_to(key, values.shape)
    outside = np.ones(values.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():
            x, k = values[outside], chosen[outside]
            high, lower = x >> shift, x & low
            for turn in range(ROUNDS):
                scrambled = _mix(lower + k + np.uint64(turn) * _GOLDEN)
                high, lower = lower, high ^ (scrambled & low)
            values[outside] = (high << shift) | lower
            outside = values >= np.uint64(size)
    return values.astype(np.int64)


def sample_indices(seed: int, counters: Integers, size: int) -> Integers:
    """Return the index, among ``size`` items, of each sample; every epoch has its own order."""
    epochs, places = np.divmod(counters, size)
    return permuted(places, size, keys(seed, epochs))


def quotas(weights: Sequence[float]) -> list[int]:
    """Return how many of each :data:`PERIOD` samples belong to each text of a mixture.

    Weights are rounded by largest remainders; every text gets at least one sample.
    """
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    counts = [max(int(share), 1) for share in exact]
    missing = PERIOD - sum(counts)
    order = sorted(range(len(exact)), key=lambda i: exact[i] - counts[i], reverse=True)
    for index in order[: max(missing, 0)]:
        counts[index] += 1
    # Texts with a smaller share take their one sample from the largest.
    counts[counts.index(max(counts))] += min(missing, 0)
    return counts


def assigned(seed: int, counters: Integers, counts: Sequence[int]) -> tuple[Integers, Integers]:
    """Return each sample's text, and its number among the samples of that text.

    A text's samples of one period have consecutive numbers, in random order. ``counts``:
    :func:`quotas` of the texts, which every period holds in a new random order.
    """
    if len(counts) == 1:
        return np.zeros_like(counters), counters
    periods, places = np.divmod(counters, PERIOD)
    slots = permuted(places, PERIOD, keys(seed, periods, 2))
    bounds = np.cumsum([0, *counts])
    texts = np.searchsorted(bounds, slots, side="right") - 1
    return texts, periods * np.array(counts)[texts] + slots - bounds[texts]


def uniforms(seed: int, counters: Integers, draws: int) -> NDArray[np.float64]:
    """Return ``[counters, draws]`` numbers in [0, 1); a row depends on seed and counter alone."""
    with np.errstate(over="ignore"):
        rows = _mix(counters.astype(np.uint64) * _GOLDEN + keys(seed))
        columns = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(rows[:, None] + columns)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
