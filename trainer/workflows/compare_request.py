"""What the ``compare`` command is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.common.errors import Problem


@dataclass(frozen=True)
class CompareRequest:
    """``runs``: run directories, those of controls, or of sweeps, which stand for their runs.
    ``output``: where the comparison goes (null: the sweep's directory, or one below ``multirun``).
    """

    runs: list[str] = field(default_factory=list)
    output: str | None = None

    def problems(self) -> list[Problem]:
        """What is missing, one sentence each."""
        if self.runs:
            return []
        return [Problem("runs", "give run directories, or that of a sweep: compare runs/a runs/b.")]
