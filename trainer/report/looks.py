"""Which look a model with a method has in figures: the same in all figures of all pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

NUMBERS = {
    "RoPE": 0,
    "RoPE + PI": 1,
    "RoPE + NTK-aware": 2,
    "RoPE + YaRN": 3,
    "DroPE": 4,
    "DroPE + temperature": 5,
    "NoPE from scratch": 6,
    "NoPE": 6,
    "NoPE from scratch + temperature": 7,
    "NoPE + temperature": 7,
    "HalfRoPE": 8,
    "High-frequency RoPE": 9,
    "high frequency": 9,
    "RoPE-ID": 10,
    "p-RoPE": 11,
    "HoPE": 12,
    "ALiBi": 13,
    "RoPE + cropped": 14,
    "RoPE + temperature": 15,
}
"""Of what many pages show; see :class:`~trainer.report.plotting.Series`."""


def looks(names: Iterable[str]) -> dict[str, int]:
    """A number for every name, which no two share.

    A name of :data:`NUMBERS` has the one that stands there, also where a checkpoint or a directory
    is named in brackets behind it; where that is taken, and for other names, it is the least that
    is free.
    """
    wanted = list(dict.fromkeys(names))
    found: dict[str, int] = {}
    for plain in (lambda name: name, lambda name: name.split(" (")[0]):
        for name in wanted:
            number = NUMBERS.get(plain(name))
            if name not in found and number is not None and number not in found.values():
                found[name] = number
    free = (number for number in count() if number not in found.values())
    return {name: found[name] if name in found else next(free) for name in wanted}
