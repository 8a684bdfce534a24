"""Counts, factors and fractions as words."""

from __future__ import annotations

import re

REMEDIES = {
    "loss": "The loss spikes or rises after the drop",
    "retrieval": "Retrieval stays at chance",
    "memory": "A run does not fit into memory",
    "nan": "NaN",
}
"""Headings of docs/running.md by what messages are about."""
VERDICTS = {True: "shown", False: "not shown", None: "not judged"}


def remedy(about: str) -> str:
    """Return where the documentation says what to do; ``about``: a key of :data:`REMEDIES`."""
    return f"What to do: docs/running.md, “{REMEDIES[about]}”."


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``256 trials``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def factor_label(factor: float) -> str:
    """Return ``2×`` for 2.0, ``1.5×`` for 1.5 and ``0.781×`` for 100 of 128 tokens."""
    return f"{factor:.3g}×" if factor < 100 else f"{factor:g}×"


def percent(fraction: float) -> str:
    """Return ``97.3`` for 0.973."""
    return f"{100 * fraction:.1f}"


_PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/.][\w./+-]*", re.IGNORECASE)


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def without_controls(text: str) -> str:
    """Return a text for a terminal, with visible characters in place of control characters."""
    return text.translate(_CONTROLS)
