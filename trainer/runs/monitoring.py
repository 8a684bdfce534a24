"""The ``monitor`` configuration group: what is looked at while a run trains."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.common.errors import Problem, did_you_mean
from trainer.evaluation.config import task_names


@dataclass(frozen=True)
class BenchmarksConfig:
    """Tasks that the model in training answers, also before and after the drop and at the end.

    ``every``, ``every_tokens``: steps, or tokens, between them (null: never). ``tasks``: of
    :func:`~trainer.evaluation.config.task_names`, on validation text at ``lengths`` times the
    training length. ``multiple_choice``: tasks of request files in ``directory`` (null: where
    scripts/fetch_benchmarks.py puts them). ``harness``: tasks of lm-eval; ``include_path``: a
    directory with more of them. ``limit``: questions, trials or windows of each task and length.
    How tasks are made, and tokens in a forward pass, is the evaluation's.
    """

    every: int | None = None
    every_tokens: int | None = None
    tasks: list[str] = field(default_factory=list)
    lengths: list[float] = field(default_factory=lambda: [1.0, 2.0])
    multiple_choice: list[str] = field(default_factory=list)
    directory: str | None = None
    harness: list[str] = field(default_factory=list)
    include_path: str | None = None
    limit: int = 200

    @property
    def enabled(self) -> bool:
        """Whether anything is asked at all."""
        return self.every is not None or self.every_tokens is not None

    def is_due(self, before: int, tokens: int, step: int) -> bool:
        """After a step, ``before`` and after which so many tokens were read."""
        if self.every is not None:
            return step % self.every == 0
        return self.every_tokens is not None and (
            before // self.every_tokens < tokens // self.every_tokens
        )

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"monitor.benchmarks.{key}", f"expected 1 or more, got {value}.")
            for key in ("every", "every_tokens", "limit")
            if (value := getattr(self, key)) is not None and value < 1
        ]
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
        if not self.lengths or min(self.lengths) <= 0:
            found.append(
                Problem(
                    "monitor.benchmarks.lengths",
                    f"expected positive multiples of the training length, got {self.lengths}.",
                )
            )
        return found


@dataclass(frozen=True)
class MonitorConfig:
    """Measurements of the model in training, also on both sides of the drop and at the end.

    They change nothing of what is trained. ``lengths_every``: steps between measurements of
    retrieval and held-out loss on validation text (null: never), at ``lengths`` times the training
    length, with ``trials`` retrieval trials (where the training text carries needles; 0: none) and
    ``windows`` windows of text a length, rounded up to a multiple of the ranks. ``probe_every``:
    steps between looks at the attention of every layer (null: never), on ``probe_sequences``
    sequences. Needles in a trial, tokens in a forward pass and the seed are the evaluation's.
    ``benchmarks``: tasks that the model answers meanwhile.
    """

    lengths_every: int | None = None
    lengths: list[int] = field(default_factory=lambda: [1, 2, 4])
    trials: int = 64
    windows: int = 16
    probe_every: int | None = None
    probe_sequences: int = 2
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"monitor.{key}", f"expected 1 or more, got {value}.")
            for key in ("lengths_every", "windows", "probe_every", "probe_sequences")
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if not self.lengths or min(self.lengths) < 1:
            found.append(
                Problem(
                    "monitor.lengths",
                    f"expected multiples of the training length, 1 or more, got {self.lengths}.",
                )
            )
        if self.trials < 0:
            found.append(Problem("monitor.trials", f"expected 0 or more, got {self.trials}."))
        return found + self.benchmarks.problems()
