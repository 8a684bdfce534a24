"""Settings of the preparation of a text.

They stand apart from the text's own, which import numpy: the command needs them at its start.
"""

from __future__ import annotations

import re

from trainer.common.errors import Problem
from trainer.common.fields import Processes, configuration


@configuration
class PrepareConfig:
    """Which part of the text is prepared, by how many processes."""

    part: str | int = "1/1"
    """Part of the text, as 3/16 for the third of 16 that processes or nodes prepare one each."""
    workers: Processes | None = None
    """Processes that tokenise, or threads that verify; null: one a core."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        match = re.fullmatch(r"(\d+)/(\d+)", str(self.part))
        if match is not None and 1 <= int(match[1]) <= int(match[2]):
            return []
        return [
            Problem(
                "prepare.part",
                f"expected a part and how many there are, such as 3/16, got {self.part!r}.",
            )
        ]

    @property
    def number_of(self) -> tuple[int, int]:
        """Number of the part, from 1, and the number of parts."""
        number, _, parts = str(self.part).partition("/")
        return int(number), int(parts)
