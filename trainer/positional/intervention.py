"""Interventions on bands of heads: factors on channels of queries and keys, and noise in their
place (DoPE; Weighted RoPE).

A rotated pair shares one factor, so that a factor before the rotation is one after it. They are
made for an evaluation, and never stored with a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

Factors = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Intervention:
    """What is done to the heads of one layer after the rotation.

    ``query``, ``key``: a factor for every channel of every head, ``[Hq][D]`` and ``[Hkv][D]``, or
    ``[Hq][D]`` in a layer with a spectrum for every query head; empty: all 1. ``query_noise``,
    ``key_noise``: the standard deviation of Gaussian noise that is added to every channel of a
    head, likewise; empty: none.
    The noise is a fixed function of ``seed``, head and position.
    """

    query: Factors = ()
    key: Factors = ()
    query_noise: tuple[float, ...] = ()
    key_noise: tuple[float, ...] = ()
    seed: int = 0
