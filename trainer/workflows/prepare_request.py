"""What ``prepare`` is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainer.common.errors import Problem
from trainer.runs.config import RunConfig


@dataclass(frozen=True)
class PrepareConfig:
    """``part``: ``3/16`` is the third of 16 parts, each prepared by a process of its own.
    ``workers``: processes that tokenise (null: one a core)."""

    part: str | int = "1/1"
    workers: int | None = None

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
        if self.workers is not None and self.workers < 1:
            found.append(Problem("prepare.workers", f"expected 1 or more, got {self.workers}."))
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
