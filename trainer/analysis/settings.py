"""Names and settings of analyses. Imports no torch, so that ``--help`` and configuration errors
come fast."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

ALL, DROP, OFFSETS = "all", "drop", "offset_features"
COMPARING = (DROP, OFFSETS, ALL)
"""Kinds that can compare the analysed model with another one."""
ANALYSES = [
    "clusters",
    "sinks",
    "synthetic",
    "frequency_entropy",
    OFFSETS,
    "matrix_entropy",
    "positional_bias",
]
"""Analyses of one model, in the order of the page; plugins add theirs."""


def kinds() -> tuple[str, ...]:
    """Return all values of ``analysis.kind``: one analysis, ``all``, or ``drop``, which compares
    two models."""
    return (ALL, *ANALYSES, DROP)


class Gate(NamedTuple):
    """Selects the pairs whose entropy ``measure`` is ``side`` the threshold ``tau``."""

    measure: str
    side: Literal["below", "above"]
    tau: float


GATE = re.compile(r"(spectrum|sequence)\s*([<>])\s*(0?\.\d+|[01](?:\.\d*)?)")


def rules(gate: str) -> tuple[Gate, ...]:
    """Parse a gate such as ``spectrum>0.4+sequence<0.6``, which selects the pairs of all its rules.

    Raises:
        ValueError: the gate is malformed.
    """
    parsed: list[Gate] = []
    for part in gate.split("+"):
        if not (match := GATE.fullmatch(part.strip())):
            raise ValueError(gate)
        measure, sign, tau = match.groups()
        parsed.append(Gate(measure, "below" if sign == "<" else "above", float(tau)))
    return tuple(parsed)
