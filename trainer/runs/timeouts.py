"""How long ranks wait for each other before they give up."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainer.common.errors import Problem


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds. ``start``: until the first step is done, to meet, to read weights and to compile.
    ``collective``: in a collective of training, after the first step. ``one_rank``: for what one
    rank does alone: checks, checksums of a checkpoint, writing its last files to a slow disk.
    """

    start: float = 1800.0
    collective: float = 600.0
    one_rank: float = 7200.0

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        return [
            Problem(f"strategy.timeouts.{field.name}", f"expected seconds, got {value}.")
            for field in fields(self)
            if not (value := getattr(self, field.name)) > 0
        ]
