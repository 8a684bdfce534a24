"""What the ``compare`` command is asked for."""

from __future__ import annotations

from dataclasses import field

from trainer.common.errors import Problem
from trainer.common.fields import OptionalText, configuration


@configuration
class CompareRequest:
    """What the compare command is asked for."""

    runs: list[str] = field(default_factory=list)
    """Run directories, or the directory of a sweep, which stands for its runs."""
    output: OptionalText = None
    """Directory of the comparison; null: the sweep's, or one below multirun
    with what the runs' names begin with."""

    def problems(self) -> list[Problem]:
        """What is missing, one sentence each."""
        if self.runs:
            return []
        return [Problem("runs", "give run directories, or that of a sweep: compare runs/a runs/b.")]
