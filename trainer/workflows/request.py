"""What the requests about finished models have in common."""

from __future__ import annotations

from trainer.data.config import DataConfig


def request_problems(
    checkpoint: str | None, threads: int | None, text: DataConfig | None = None
) -> list[str]:
    """What is impossible of these keys of a request, one sentence each."""
    found = [] if text is None else [f"text: {problem}" for problem in text.problems()]
    if not checkpoint:
        found.append("checkpoint: give checkpoint=runs/NAME, or a checkpoint in it.")
    if threads is not None and threads < 1:
        found.append(f"threads: expected 1 or more, got {threads}.")
    return found
