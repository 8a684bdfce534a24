"""What the ``export`` command is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.common.errors import Problem
from trainer.workflows.request import request_problems


@dataclass(frozen=True)
class ExportRequest:
    """``checkpoint``: a run directory, a checkpoint, or a published model or an earlier export, to
    be written anew. ``to``: a directory that is new or empty.

    ``tolerance``: how far logits may differ in float32, as a share of the largest. ``dtype``: of
    the weights. ``threads``: of the CPU (null: ``OMP_NUM_THREADS``, or all cores).
    """

    checkpoint: str | None = None
    to: str | None = None
    tolerance: float = 1e-4
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None

    def problems(self) -> list[Problem]:
        """What is missing or impossible, one sentence each."""
        found = request_problems(self.checkpoint, self.threads)
        if not self.to:
            found.append(Problem("to", "give to=DIRECTORY, new or empty."))
        if not self.tolerance >= 0:
            found.append(Problem("tolerance", f"expected 0 or more, got {self.tolerance}."))
        return found
