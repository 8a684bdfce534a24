"""What the requests about finished models have in common."""

from __future__ import annotations

from trainer.common.errors import Problem
from trainer.data.config import DataConfig


def request_problems(checkpoint: str | None, text: DataConfig | None = None) -> list[Problem]:
    """What is impossible of these keys of a request, one sentence each."""
    found = [] if text is None else [p.renamed({"data": "text"}) for p in text.problems()]
    if not checkpoint:
        found.append(Problem("checkpoint", "give checkpoint=runs/NAME, or a checkpoint in it."))
    return found
