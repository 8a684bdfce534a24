"""Analyses by the names that ``analysis.kind`` takes; known without what they import."""

from __future__ import annotations

ALL, DROP, OFFSETS = "all", "drop", "offset_features"
COMPARING = (DROP, OFFSETS, ALL)
"""Those that show another model beside the one that is analysed."""
ANALYSES = [
    "clusters",
    "sinks",
    "synthetic",
    "frequency_entropy",
    OFFSETS,
    "matrix_entropy",
    "positional_bias",
]
"""Of one model, in the order of a page; plugins add theirs."""


def kinds() -> tuple[str, ...]:
    """All that can be asked for: one analysis, all that a model has the structure for, or a drop,
    which compares two models."""
    return (ALL, *ANALYSES, DROP)
