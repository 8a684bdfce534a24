"""Held-out text of a run: windows and documents of its texts, in the shares of their weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.encoding import Split
from trainer.data.order import Integers
from trainer.data.prepared import Tokens


@dataclass(frozen=True)
class HeldOutPart:
    """One text of a mixture and its weight."""

    name: str
    weight: float
    stream: Tokens


@dataclass(frozen=True)
class HeldOutText:
    """One held-out split of all texts of a run; ``name`` says which.

    Windows of a mixture come from its parts in the shares of their weights, whatever their sizes.
    Each window lies within one part.
    """

    name: Split
    parts: tuple[HeldOutPart, ...]

    def __len__(self) -> int:
        """Return the number of tokens of all parts."""
        return sum(len(part.stream) for part in self.parts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest window."""
        return max(len(part.stream) for part in self.parts)

    def shares(self, count: int, length: int, apart: int | None = None) -> list[int]:
        """Divide ``count`` windows of ``length`` tokens among the parts by their weights.

        A part with too little text gives what it has and the others give the rest, with a warning.
        ``apart``: least distance between two windows (None: they may overlap). Together the parts
        may have fewer windows than ``count``.
        """

        def most(part: HeldOutPart) -> int:
            spare = len(part.stream) - length
            if spare < 0:
                return 0
            return count if apart is None else spare // apart + 1

        weights, available = [part.weight for part in self.parts], [*map(most, self.parts)]
        shares = divided(count, weights, available)
        wanted = divided(count, weights, [count] * len(weights))
        names = [part.name for part in self.parts]
        if count > 1 and len(names) > 1 and shares != wanted:  # one window has no shares
            warnings.warn(
                f"windows of {length:,} tokens of the texts {names}: expected {wanted} by their "
                f"weights, got {shares}, since {self.name} text is short",
                stacklevel=2,
            )
        return shares

    def windows(
        self, shares: Sequence[int], windows_of: Callable[[Tokens, int], Integers]
    ) -> Integers:
        """Return the windows of all parts, those of each part spread evenly among the others.

        ``windows_of``: returns so many windows of one part.
        """
        rows = [windows_of(part.stream, n) for part, n in zip(self.parts, shares, strict=True) if n]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)[_spread(shares)]

    def parts_of_windows(self, shares: Sequence[int]) -> Integers:
        """Return the index of the part of each window of :meth:`windows`."""
        return np.repeat(np.arange(len(shares)), shares)[_spread(shares)]


def held_out_windows(
    text: HeldOutText, count: int, length: int, apart: int | None = None
) -> Integers:
    """Return ``[count, length]`` tokens, evenly spaced in each part of held-out text.

    ``apart``: as for :meth:`HeldOutText.shares`.

    Raises:
        ValueError: the text is shorter than one window.
    """
    if text.longest < length:
        raise ValueError(f"{text.longest} tokens do not fill a window of {length}")

    def of_part(stream: Tokens, windows: int) -> Integers:
        starts = np.linspace(0, len(stream) - length, windows).astype(np.int64)
        return stream.windows(starts, length)

    return text.windows(text.shares(count, length, apart), of_part)


def divided(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide ``count`` by weights with largest remainders, at most ``most[i]`` for item i.

    What an item cannot take is divided among the others.
    """
    shares = [0] * len(weights)
    open_items, left = list(range(len(weights))), count
    while open_items:
        total = sum(weights[i] for i in open_items)
        exact = {i: left * weights[i] / total for i in open_items}
        full = [i for i in open_items if exact[i] > most[i]]
        if not full:
            for i in open_items:
                shares[i] = int(exact[i])
            left -= sum(shares[i] for i in open_items)
            for i in sorted(open_items, key=lambda i: shares[i] - exact[i])[:left]:
                shares[i] += 1
            break
        for i in full:
            shares[i] = most[i]
            left -= most[i]
        open_items = [i for i in open_items if i not in full]
    return shares


def _spread(shares: Sequence[int]) -> Integers:
    """Return the order in which items of groups of these sizes are spread evenly."""
    places = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in shares])
    return np.argsort(places, kind="stable")
