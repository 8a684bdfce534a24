"""What ``prepare`` is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainer.common.errors import Problem
from trainer.common.fields import Processes, configuration
from trainer.runs.config import RunConfig


@configuration
class PrepareConfig:
    """Which part of the text is prepared, by how many processes."""

    part: str | int = "1/1"
    """Part of the text, as 3/16 for the third of 16 that processes or nodes prepare one each."""
    workers: Processes | None = None
    """Processes that tokenise; null: one a core."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        match = re.fullmatch(r"(\d+)/(\d+)", str(self.part))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            found.append(
                Problem(
                    "prepare.part",
                    f"expected a part and how many there are, such as 3/16, got {self.part!r}.",
                )
            )
        return found

    @property
    def number_of(self) -> tuple[int, int]:
        """The part, from 1, and how many there are."""
        number, _, parts = str(self.part).partition("/")
        return int(number), int(parts)


@dataclass(frozen=True)
class PrepareRequest:
    """The run whose text is prepared; ``verify``: compare with checksums instead."""

    config: RunConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    verify: bool = False
