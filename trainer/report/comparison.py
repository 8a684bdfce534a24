"""Comparison of two measurements: retrieval by its 95% intervals, loss by a margin and its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.report.outcomes import Result
from trainer.report.statistics import Estimate, change
from trainer.report.words import percent

# With less retrieval than this at the training length a model has not learned the task, and its
# retrieval at longer lengths says nothing about its reach.
LEARNED = 0.5

# The method that stands for another at the training length where that was not measured there:
# extensions and temperatures are the identity at factor 1.
_BASE = {
    "rope_pi": "rope",
    "rope_ntk": "rope",
    "rope_yarn": "rope",
    "rope_temperature": "rope",
    "drope_temperature": "drope",
    "nope_temperature": "nope",
    "rope_id_temperature": "rope_id",
}


def certainly_exceeds(a: Result, b: Result, times: float) -> bool:
    """Whether the retrieval of ``a`` is above ``times`` that of ``b`` with 95% confidence.

    True when the lower limit of a − k b is positive, with the limits of a and b put together as
    Newcombe (Statistics in Medicine 17, 1998, method 10) does for differences and Zou and Donner
    (ibid. 27, 2008) for linear combinations: a − k b − sqrt((a − low a)² + k² (high b − b)²). It
    takes the two as independent, which is cautious where they were asked the same questions.
    """
    p, q = _retrieval(a), _retrieval(b)
    least = math.hypot(p.mean - p.low, times * (q.high - q.mean))
    return p.mean - times * q.mean - least > 0


def loss_change(cell: Result, reference: Result) -> Estimate:
    """Relative difference of two losses: 0.01 when ``cell`` is 1% above ``reference``, with its
    interval over the windows of text that both were measured on; without one, which is then no
    wider than the value, where their windows are not known."""
    if cell.loss is None or reference.loss is None:
        raise ValueError("a loss that was not measured cannot be compared")
    if cell.losses and len(cell.losses) == len(reference.losses):
        return change(cell.losses, reference.losses)
    only = cell.loss / reference.loss - 1
    return Estimate(only, only, only)


def change_in_words(found: Estimate) -> str:
    """``+7.5% (+6.9% to +8.0%)``."""
    if found.low == found.high:
        return f"{found.mean:+.1%}"
    return f"{found.mean:+.1%} ({found.low:+.1%} to {found.high:+.1%})"


def in_words(cell: Result) -> str:
    """``DroPE 95.6% (92.4–97.5)``."""
    own = _retrieval(cell)
    return f"{cell.name} {percent(own.mean)}% ({percent(own.low)}–{percent(own.high)})"


def pair_in_words(a: Result, b: Result) -> str:
    """Two retrieval rates with their intervals: at one length, or of one method."""
    if a.length == b.length:
        return f"At {a.length} tokens {in_words(a)}, {in_words(b)}."
    return f"{in_words(a)} at {a.length} tokens, {in_words(b)} at {b.length}."


@dataclass(frozen=True)
class Measured:
    """The results of a run by the role of their method."""

    cells: Sequence[Result]
    roles: Mapping[str, str]

    def with_temperature(self, role: str) -> str:
        """The role with a temperature where that was measured, else the role itself."""
        scaled = f"{role}_temperature"
        return scaled if any(c.name == self.roles.get(scaled) for c in self.cells) else role

    def at(self, role: str, length: int) -> Result | None:
        """The cell of a role's method at a length, if there is one."""
        method = self.roles.get(role)
        return next((c for c in self.cells if (c.name, c.length) == (method, length)), None)

    def cell(self, role: str, length: int) -> Result:
        """The cell of a role's method at a length. Raises ``KeyError`` when there is none."""
        cell = self.at(role, length)
        if cell is None:
            raise KeyError((role, length))
        return cell

    def trained(self, role: str, quantity: str = "retrieval") -> Result | None:
        """The cell at the training length that has ``quantity``; an extension or temperature not
        measured there is what it extends."""
        for candidate in (role, _BASE.get(role)):
            for cell in self.cells:
                same = candidate is not None and cell.name == self.roles.get(candidate)
                if same and cell.factor == 1 and getattr(cell, quantity) is not None:
                    return cell
        return None

    def beyond(self, *roles: str, quantity: str = "retrieval") -> list[int]:
        """The lengths above the training length at which all roles have ``quantity``, ascending."""
        lengths = sorted({cell.length for cell in self.cells if cell.factor > 1})
        return [
            length
            for length in lengths
            if all(getattr(self.at(role, length), quantity, None) is not None for role in roles)
        ]

    def not_learned(self, *roles: str) -> str | None:
        """Why the reach of these methods cannot be judged; ``None`` when it can."""
        for role in roles:
            cell = self.trained(role)
            if cell is None:
                return f"Not judged: {self.roles[role]} was not measured at its training length."
            if _retrieval(cell).mean < LEARNED:
                return (
                    f"Not judged: within its training length of {cell.length} tokens "
                    f"{in_words(cell)} has not learned the task (below {100 * LEARNED:g}%)."
                )
        return None


def _retrieval(cell: Result) -> Estimate:
    if cell.retrieval is None:
        raise ValueError(f"{cell.name!r} has no retrieval at {cell.length} tokens")
    return cell.retrieval
