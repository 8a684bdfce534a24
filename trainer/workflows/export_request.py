"""What the ``export`` command is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.errors import UserError
from trainer.runs.parsing import validated


@dataclass(frozen=True)
class ExportRequest:
    """``checkpoint``: a run directory or a checkpoint. ``to``: a directory that is new or empty.

    ``tolerance``: how far logits may differ in float32, as a share of the largest. ``dtype``: of
    the weights. ``threads``: of the CPU (null: all cores).
    """

    checkpoint: str | None = None
    to: str | None = None
    tolerance: float = 1e-4
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None

    def problems(self) -> list[str]:
        """What is missing or impossible, one sentence each."""
        found = []
        if not self.checkpoint:
            found.append("checkpoint: give checkpoint=runs/NAME, or a checkpoint in it.")
        if not self.to:
            found.append("to: give to=DIRECTORY, new or empty.")
        if not self.tolerance >= 0:
            found.append(f"tolerance: expected 0 or more, got {self.tolerance}.")
        if self.threads is not None and self.threads < 1:
            found.append(f"threads: expected 1 or more, got {self.threads}.")
        return found


def parse_export(values: dict[str, Any], found: Sequence[str] = ()) -> ExportRequest:
    """A checked request; ``found`` are problems already known.

    Raises:
        UserError: with every problem that can be seen before the checkpoint is read.
    """
    request, problems = validated(ExportRequest, values)
    if problems := [*found, *problems, *request.problems()]:
        raise UserError(*problems)
    return request
