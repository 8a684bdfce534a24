"""Settings and scores of benchmark evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchmarkConfig:
    """The keys that all kinds of benchmark have.

    ``limit``: questions a task, the first ones (null: all). ``max_length``: tokens the model reads
    at once; longer contexts lose their beginning (null: the training length). ``batch_tokens``:
    tokens in one forward pass. ``add_bos``: begin every text with end-of-text, as sequences in
    training do (null: yes for runs of this program; of published weights the tokenizer decides).
    """

    tasks: list[str] = field(default_factory=list)
    limit: int | None = None
    max_length: int | None = None
    batch_tokens: int = 4096
    add_bos: bool | None = None

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        found = [
            f"evaluation.{key}: expected 1 or more, got {value}."
            for key in ("limit", "max_length", "batch_tokens")
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if not self.tasks:
            found.append("evaluation.tasks: expected one or more, for instance [arc_easy,piqa].")
        return found


@dataclass(frozen=True)
class MultipleChoiceConfig(BenchmarkConfig):
    """Questions from files.

    ``directory``: where ``TASK.jsonl.gz`` lie (null: what scripts/fetch_benchmarks.py fetched).
    ``unconditional``: also score answers by how much the question makes them likelier, where the
    files can; it doubles the work.
    """

    directory: str | None = None
    unconditional: bool = True


@dataclass(frozen=True)
class HarnessConfig(BenchmarkConfig):
    """Tasks of lm-eval, which gets their data from the hub.

    ``num_fewshot``: solved examples before each question (null: as the task says).
    ``include_path``: a directory with more tasks.
    """

    num_fewshot: int | None = None
    include_path: str | None = None


@dataclass(frozen=True)
class Score:
    """One metric of one task: its mean over ``questions``, and the standard error of that."""

    task: str
    metric: str
    value: float
    standard_error: float | None
    questions: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, null for a number that is not finite."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
        }


def mean_score(task: str, metric: str, values: Iterable[float]) -> Score:
    """The mean, and the sample standard deviation over the square root of their number."""
    numbers = list(values)
    n, mean = len(numbers), sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (n - 1) if n > 1 else None
    return Score(task, metric, mean, None if variance is None else (variance / n) ** 0.5, n)
