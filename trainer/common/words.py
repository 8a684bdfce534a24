"""Counts, factors and fractions as words."""

from __future__ import annotations

VERDICTS = {True: "shown", False: "not shown", None: "not judged"}


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``256 trials``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def factor_label(factor: float) -> str:
    """Return ``2×`` for 2.0, ``1.5×`` for 1.5 and ``0.781×`` for 100 of 128 tokens."""
    return f"{factor:.3g}×" if factor < 100 else f"{factor:g}×"


def percent(fraction: float) -> str:
    """Return ``97.3`` for 0.973."""
    return f"{100 * fraction:.1f}"
