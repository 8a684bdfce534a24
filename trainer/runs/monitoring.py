"""The ``monitor`` configuration group: what is looked at while a run trains."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from trainer.common.errors import Problem, did_you_mean
from trainer.common.fields import Count, Multiple, Natural, OptionalText, configuration
from trainer.evaluation.config import task_names


@configuration
class BenchmarksConfig:
    """Tasks that the model answers in training, also before and after the drop and at the end."""

    every: Count | None = None
    """Steps between them; null: never."""
    every_tokens: Count | None = None
    """Tokens between them, instead of steps; null: see every."""
    tasks: list[str] = field(default_factory=list)
    """Tasks on validation text, named as in evaluation.tasks."""
    lengths: list[Multiple] = field(default_factory=lambda: [1.0, 2.0])
    """Lengths of these tasks, in multiples of the training length."""
    multiple_choice: list[str] = field(default_factory=list)
    """Tasks of request files, for instance [arc_easy, piqa]."""
    directory: OptionalText = None
    """Directory of the request files; null: where scripts/fetch_benchmarks.py puts them."""
    harness: list[str] = field(default_factory=list)
    """Tasks of lm-eval."""
    include_path: OptionalText = None
    """Directory with more tasks of lm-eval; null: none."""
    limit: Count = 200
    """Questions, trials or windows of each task and length."""

    @property
    def enabled(self) -> bool:
        """Whether any measurement is enabled."""
        return self.every is not None or self.every_tokens is not None

    def is_due(self, before: int, tokens: int, step: int) -> bool:
        """Whether a measurement is due after ``step``, given the tokens before and after it."""
        if self.every is not None:
            return step % self.every == 0
        return self.every_tokens is not None and (
            before // self.every_tokens < tokens // self.every_tokens
        )

    def problems(self) -> list[Problem]:
        """Check the values."""
        found = []
        given = [*self.tasks, *self.multiple_choice, *self.harness]
        if self.every is not None and self.every_tokens is not None:
            found.append(
                Problem(
                    "monitor.benchmarks.every_tokens", "give steps (every) or tokens, not both."
                )
            )
        if self.enabled and not given:
            found.append(
                Problem(
                    "monitor.benchmarks",
                    "expected tasks, multiple_choice or harness to name one or more, for "
                    "instance monitor.benchmarks.multiple_choice=[piqa].",
                )
            )
        if given and not self.enabled:
            found.append(
                Problem(
                    "monitor.benchmarks.every",
                    "expected the steps (or every_tokens) between them, for instance 1000.",
                )
            )
        found += [
            Problem(
                "monitor.benchmarks.tasks",
                f"unknown task {name!r}.",
                did_you_mean(name, task_names()),
            )
            for name in self.tasks
            if name not in task_names()
        ]
        if not self.lengths:
            found.append(
                Problem(
                    "monitor.benchmarks.lengths",
                    f"expected positive multiples of the training length, got {self.lengths}.",
                )
            )
        return found


@configuration
class MonitorConfig:
    """Measurements of the model in training; they change nothing of what is trained."""

    lengths_every: Count | None = None
    """Steps between measurements of retrieval and held-out loss by length; null: never."""
    lengths: list[Annotated[Count, Field(le=1_000_000)]] = field(default_factory=lambda: [1, 2, 4])
    """Lengths to measure at, in multiples of the training length."""
    trials: Annotated[Natural, Field(le=1_000_000)] = 64
    """Retrieval trials of a length, if the training text carries needles; 0: none."""
    windows: Count = 16
    """Windows of held-out text of a length, rounded up to a multiple of the ranks."""
    probe_every: Count | None = None
    """Steps between looks at the attention of every layer; null: never."""
    probe_sequences: Count = 2
    """Sequences that such a look reads."""
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    """Tasks that the model answers in training; each kind may be empty."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        found = self.benchmarks.problems()
        if not self.lengths:
            found.append(Problem("monitor.lengths", "expected one or more, got none."))
        return found
