"""Content of a study's section: text, findings, figures, tables and indicators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

Array = np.ndarray
Rows = list[tuple[Any, ...]]


def long_rows(
    values: Mapping[tuple[Any, ...], Array], *, places: Sequence[Any] | None = None
) -> Rows:
    """Return a row for each number of some arrays: the array's key, the index, and the number.

    ``places``: meanings of the last index, such as lengths in tokens; None: itself.
    """
    return [
        (*key, *index[:-1], index[-1] if places is None else places[index[-1]], float(value))
        for key, array in values.items()
        for index, value in np.ndenumerate(array)
    ]


def wide_rows(columns: Sequence[Array]) -> Rows:
    """Return a row for each index of equally shaped arrays: the index and every array's number."""
    return [
        (*index, *(float(values[index]) for values in columns))
        for index in np.ndindex(columns[0].shape)
    ]


def column_rows(columns: Iterable[Array]) -> Rows:
    """Return the rows of columns ``[n]``."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class Picture:
    """A figure with its numbers: ``rows`` under ``header`` are written to a CSV file beside it.

    ``name``: name of the files, unique in a page. ``caption``: the plotted values, axes and units
    in words, and a hint on how to read them.
    """

    name: str
    figure: Figure
    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Grid:
    """A small table: ``rows`` of words and numbers under ``header``."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Section:
    """One analysis.

    ``text``: a paragraph on the measure and how to read it. ``formula``: plain text
    with Unicode signs, one formula a line, set by :mod:`trainer.report.mathml`. ``source``: paper,
    section, figures. ``findings``: sentences about this model, computed from its numbers.
    ``numbers``: all numbers, for JSON; arrays become lists, and numbers that are not finite None.
    """

    key: str
    title: str
    text: str
    formula: tuple[str, ...]
    source: str
    findings: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    grids: tuple[Grid, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", _plain(self.numbers))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Part:
    """Findings, pictures, tables and numbers that one step adds to its study's section."""

    findings: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    grids: tuple[Grid, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)


def joined(parts: Sequence[Part]) -> Part:
    """Join parts into one, in their order."""
    return Part(
        findings=tuple(finding for part in parts for finding in part.findings),
        pictures=tuple(picture for part in parts for picture in part.pictures),
        grids=tuple(grid for part in parts for grid in part.grids),
        numbers={key: value for part in parts for key, value in part.numbers.items()},
    )


def last_within(lengths: Sequence[float], trained: int) -> int:
    """Return the index of the longest of some ascending lengths within the training length."""
    return max((i for i, n in enumerate(lengths) if n <= trained), default=0)


Verdict = Literal["holds", "drifts", "breaks"]
DRIFT, BREAK = 0.1, 1 / 3
"""Relative changes for the worse, beyond the training length, from which a value drifts or breaks;
smaller ones than its change within the training length are ignored."""
MOST_LOST = 0.5
"""Largest share of a value that may be lost and still be as within the training length: all falls
are at most 1, so a steep one before would excuse the loss of the whole value."""
_WIDTH, _HEIGHT = 120, 34  # of the curve, in its own units


@dataclass(frozen=True)
class Indicator:
    """One measure by length, within the training length and beyond.

    ``lengths``: tokens, ascending; ``values``: the measure at these lengths. ``wanted``: the better
    direction, ``"high"`` or ``"low"``. ``least``: smallest size of a value that changes are divided
    by. ``percent``: whether the value is a share. ``judged``: whether a change means anything.
    """

    name: str
    lengths: Sequence[float]
    values: Sequence[float]
    trained: int
    wanted: Literal["high", "low"]
    meaning: str
    least: float = 0.05
    percent: bool = False
    judged: bool = True

    @property
    def within(self) -> float:
        """The value at the longest length within the training length."""
        return self.values[last_within(self.lengths, self.trained)]

    @property
    def compared(self) -> str:
        """The lengths that are compared, ``; at 256 and 2,048 tokens``; empty if nothing is."""
        within = self.lengths[last_within(self.lengths, self.trained)]
        beyond = self.lengths[-1]
        return f"; at {within:,.0f} and {beyond:,.0f} tokens" if self.goes_beyond else ""

    @property
    def beyond(self) -> float:
        """The value at the longest length of all."""
        return self.values[-1]

    @property
    def goes_beyond(self) -> bool:
        """Whether there is a value beyond the training length."""
        return self.lengths[-1] > self.trained

    @property
    def change(self) -> float:
        """Change from within to beyond, relative, positive for the worse."""
        size = max(abs(self.within), self.least)
        change = (self.beyond - self.within) / size
        return change if self.wanted == "low" else -change

    @property
    def usual(self) -> float:
        """Relative change of either sign from half the training length to the training length, an
        estimate of the effect of a longer text alone; 0 if half the length was not read."""
        half = [v for n, v in zip(self.lengths, self.values, strict=True) if 2 * n <= self.trained]
        size = max(abs(self.within), self.least)
        return abs(self.within - half[-1]) / size if half else 0.0

    @property
    def verdict(self) -> Verdict | None:
        """Whether the measure holds beyond the training length.

        None if no longer text was read, a change means nothing, or a value that should be high is
        closer to 0 than :attr:`least`, at the training length and beyond it.

        The null hypothesis is that longer texts change as much as those within the training length:
        a change no larger than :attr:`usual` holds, unless more than half of a value that should
        be high is lost.
        """
        if not (self.judged and self.goes_beyond and math.isfinite(self.change)):
            return None
        if self.wanted == "high" and max(abs(self.within), abs(self.beyond)) < self.least:
            return None  # nothing that could be lost
        usual = self.usual if self.wanted == "low" else min(self.usual, MOST_LOST)
        if self.change <= max(DRIFT, usual):
            return "holds"
        return "breaks" if self.change > BREAK else "drifts"

    def shown(self, value: float) -> str:
        """Format a value, as in ``61%`` or ``0.427``."""
        return f"{100 * value:.3g}%" if self.percent else f"{value:.3g}"

    @property
    def curve(self) -> str:
        """The curve by length (logarithmic) as points of an SVG polyline."""
        low, high = min(self.values), max(self.values)
        # The scale spans at least half the value, so that small changes look small.
        room = max(high - low, 0.5 * max(abs(low), abs(high)), 1e-9)
        low = min(low, (low + high - room) / 2)
        return " ".join(
            f"{self._x(n):.1f},{_HEIGHT - 2 - (v - low) / room * (_HEIGHT - 4):.1f}"
            for n, v in zip(self.lengths, self.values, strict=True)
        )

    @property
    def mark(self) -> float:
        """x of the training length in the curve."""
        return round(self._x(min(self.trained, self.lengths[-1])), 1)

    def _x(self, length: float) -> float:
        first, last = self.lengths[0], self.lengths[-1]
        return _WIDTH * math.log(max(length, first) / first) / max(math.log(last / first), 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Convert to the entry of a section's ``numbers`` under ``glance``."""
        names = ("name", "trained", "wanted", "meaning", "least", "percent", "judged")
        return {
            "lengths": [float(n) for n in self.lengths],
            "values": [float(v) for v in self.values],
            **{name: getattr(self, name) for name in names},
        }


def glance(numbers: Sequence[dict[str, Any]]) -> list[Indicator]:
    """Return the indicators in the numbers of sections, in their order."""
    return [Indicator(**entry) for section in numbers for entry in section.get("glance", [])]
