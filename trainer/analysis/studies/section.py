"""Parts of a section, for studies of several steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.report.geometry.section import Grid, Picture


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
        tuple(finding for part in parts for finding in part.findings),
        tuple(picture for part in parts for picture in part.pictures),
        tuple(grid for part in parts for grid in part.grids),
        {key: value for part in parts for key, value in part.numbers.items()},
    )
