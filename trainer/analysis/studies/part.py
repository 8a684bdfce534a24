"""A step of a study that has several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.report.geometry.section import Grid, Picture


@dataclass(frozen=True)
class Part:
    """What the step adds to the section of its study."""

    findings: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    grids: tuple[Grid, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
