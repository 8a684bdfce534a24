"""What ``inspect`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.common.errors import Problem


@dataclass(frozen=True)
class InspectionRequest:
    """``checkpoint``: a run directory or a checkpoint in it. ``step``: of the run, from 1.
    ``samples``: how many of the step's samples, from its first on. ``characters``: of each sample's
    text. ``plugins``: Python files that register text sources."""

    checkpoint: str | None = None
    step: int = 1
    samples: int = 2
    characters: int = 400
    plugins: list[str] = field(default_factory=list)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = (
            []
            if self.checkpoint
            else [Problem("checkpoint", "give a run directory, checkpoint=PATH.")]
        )
        return found + [
            Problem(key, f"expected 1 or more, got {getattr(self, key)}.")
            for key in ("step", "samples", "characters")
            if getattr(self, key) < 1
        ]
