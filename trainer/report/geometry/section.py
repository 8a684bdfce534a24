"""The content of one section: text, findings, figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure with its numbers: ``rows`` under ``header`` go into a CSV file beside it.

    ``name``: of the files, unique in a page. ``caption``: what is plotted, axes and units in words,
    and what to look for.
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

    ``text``: a paragraph: what is measured and how to read it. ``formula``: plain text with Unicode
    signs, a line each, which :mod:`trainer.report.mathml` sets. ``source``: paper, section,
    figures. ``findings``: what these numbers say about this model, a sentence each, computed from
    them. ``numbers``: everything, as JSON has it.
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
