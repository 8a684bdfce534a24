"""The order of samples and their randomness, as pure functions of (seed, counter).

Sample number ``counter`` is the same whatever came before it, however samples are batched, and on
however many workers and ranks: resuming is starting to count elsewhere. Nothing here needs memory
that grows with the number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

ROUNDS = 8
"""Of the Feistel network; four make a pseudorandom permutation (Luby and Rackoff 1988) of a large
domain, small ones need more."""

PERIOD = 10_000
"""Samples after which the texts of a mixture have had exactly their shares."""


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection that scatters bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(*numbers: int | Integers) -> Words:
    """64 bits that depend on all the numbers, and on their order."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        found = np.asarray(0, np.uint64)
        for number in numbers:
            found = _mix(found + np.asarray(number).astype(np.uint64) * _GOLDEN + _GOLDEN)
        return found


def permuted(numbers: Integers, size: int, key: Words) -> Integers:
    """Where a permutation of 0 .. ``size`` - 1 sends ``numbers``; ``key`` chooses it, for all or
    for each.

    A Feistel network of two halves permutes the next power of four; what lands at or beyond
    ``size`` goes through it again until it is below ("cycle walking", Black and Rogaway 2002).
    """
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    found = numbers.astype(np.uint64)
    chosen = np.broadcast_to(key, found.shape)
    outside = np.ones(found.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():
            x, k = found[outside], chosen[outside]
            left, right = x >> shift, x & low
            for turn in range(ROUNDS):
                scrambled = _mix(right + k + np.uint64(turn) * _GOLDEN)
                left, right = right, left ^ (scrambled & low)
            found[outside] = (left << shift) | right
            outside = found >= np.uint64(size)
    return found.astype(np.int64)


def sample_indices(seed: int, counters: Integers, size: int, group: int | None = None) -> Integers:
    """Which of ``size`` items the samples ``counters`` are: every item once an epoch, shuffled anew
    in each.

    ``group``: items are shuffled within groups of so many neighbours, and the groups among each
    other; what does not fill a group comes last. None: all items at once.
    """
    epochs, places = np.divmod(counters, size)
    if group is None or group >= size:
        return permuted(places, size, keys(seed, epochs))
    whole = size // group * group
    found = np.empty_like(places)
    inside = places < whole
    turns, within = np.divmod(places[inside], group)
    of_inside = epochs[inside]
    groups = permuted(turns, size // group, keys(seed, of_inside))
    found[inside] = groups * group + permuted(within, group, keys(seed, of_inside, 1 + groups))
    if (~inside).any():
        rest = permuted(places[~inside] - whole, size - whole, keys(seed, epochs[~inside], 0))
        found[~inside] = whole + rest
    return found


@dataclass(frozen=True)
class Mixture:
    """Which of several texts a sample is of: each :data:`PERIOD` samples hold every text in
    proportion to its weight, in an order drawn anew.

    ``quotas``: samples of each text in a period.
    """

    quotas: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> Mixture:
        """The nearest shares, by largest remainders; every text has one sample at least."""
        total = sum(weights)
        exact = [weight / total * PERIOD for weight in weights]
        quotas = [max(int(share), 1) for share in exact]
        left = PERIOD - sum(quotas)
        order = sorted(range(len(exact)), key=lambda i: exact[i] - quotas[i], reverse=True)
        for index in order[: max(left, 0)]:
            quotas[index] += 1
        # The one sample of texts that have a smaller share comes from the largest.
        quotas[quotas.index(max(quotas))] += min(left, 0)
        return cls(tuple(quotas))

    def assign(self, seed: int, counters: Integers) -> tuple[Integers, Integers]:
        """For each sample its text, and how many samples of that text come before it."""
        if len(self.quotas) == 1:
            return np.zeros_like(counters), counters
        periods, places = np.divmod(counters, PERIOD)
        slots = permuted(places, PERIOD, keys(seed, periods, 2))
        bounds = np.cumsum([0, *self.quotas])
        texts = np.searchsorted(bounds, slots, side="right") - 1
        return texts, periods * np.array(self.quotas)[texts] + slots - bounds[texts]


def uniforms(seed: int, counters: Integers, draws: int) -> NDArray[np.float64]:
    """``[len(counters), draws]`` numbers in [0, 1); row i depends on seed and counters[i] alone."""
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(seed, np.uint64) * _GOLDEN + _GOLDEN)
        rows = _mix(counters.astype(np.uint64) * _GOLDEN + key)
        columns = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(rows[:, None] + columns)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
