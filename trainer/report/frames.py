"""Axes that the figures of a report share: lengths, positions, success and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from trainer.report.plotting import Frame, log_axis, training_length_mark
from trainer.report.results import Report
from trainer.report.words import factor_label

_LINEAR = 6  # a perplexity that varies by less than this factor is drawn on a linear axis

Scale = Callable[[Axes], None]


def success(axes: Axes) -> None:
    """Percent, all of them."""
    axes.set_ylim(-4, 106)
    axes.set_yticks(range(0, 101, 25))


def perplexity_axis(values: Iterable[float]) -> Scale:
    """Logarithmic where the values span much."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def prepare(axes: Axes) -> None:
        if high < _LINEAR * low:
            room = 0.06 * (high - low) or 0.1 * high
            axes.set_ylim(low - room, high + room)
            return
        log_axis(axes, low, high)
        axes.set_ylim(low / 1.2, high * 1.2)

    return prepare


def lengths_frame(
    report: Report,
    lengths: dict[int, float],
    y_label: str,
    scale: Scale,
    narrow: bool = False,
    lines: tuple[tuple[float, str], ...] = (),
) -> Frame:
    """Lengths on a binary logarithmic axis, named in multiples of the training length and, unless
    the panel is narrow, in tokens; ``lines``: horizontal ones, with their names."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xscale("log", base=2)
        names = [factor_label(f) + ("" if narrow else f"\n{n}") for n, f in lengths.items()]
        axes.set_xticks(list(lengths), names)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

    unit = "multiple of the training length" + ("" if narrow else "; tokens")
    return Frame(
        f"sequence length ({unit})",
        y_label,
        prepare,
        training_length_mark(report.training_length, lengths),
        lines,
    )


def positions_frame(report: Report, longest: int, scale: Scale) -> Frame:
    """Positions up to the longest length, with ticks at multiples of the training length."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xlim(0, longest)
        step = min(report.training_length, longest)
        while longest / step > 4:
            step *= 2
        axes.set_xticks(range(0, longest + 1, step))

    label = f"position in sequences of {longest} tokens"
    return Frame(
        label, "perplexity", prepare, training_length_mark(report.training_length, (0, longest))
    )
