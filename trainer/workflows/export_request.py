"""What the ``export`` command is asked for."""

from __future__ import annotations

from typing import Literal

from trainer.common.errors import Problem
from trainer.common.fields import NotNegative, OptionalText, Processes, configuration
from trainer.workflows.request import request_problems


@configuration
class ExportRequest:
    """What the export command is asked for."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, or a published model or an earlier export to write anew."""
    to: OptionalText = None
    """Directory to write, new or empty."""
    tolerance: NotNegative = 1e-4
    """How far logits may differ in float32, as a share of the largest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights: float32, bfloat16 (half the size)."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""

    def problems(self) -> list[Problem]:
        """What is missing or impossible, one sentence each."""
        found = request_problems(self.checkpoint)
        if not self.to:
            found.append(Problem("to", "give to=DIRECTORY, new or empty."))
        return found
