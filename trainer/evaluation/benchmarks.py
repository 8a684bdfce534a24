"""Settings and scores of benchmark evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.common.errors import Problem, listed
from trainer.common.fields import Count, FreeForm, Natural, Number, OptionalText, configuration
from trainer.evaluation.method_config import MethodsConfig
from trainer.evaluation.outcomes import AS_IS
from trainer.evaluation.statistics import Comparison, sign_test
from trainer.positional.rescaling import RESCALINGS

NEED_A_FACTOR = (*RESCALINGS, "longrope", "temperature")
"""Parts that change nothing for an extension factor of 1."""


@configuration
class BenchmarkConfig(MethodsConfig):
    """Keys of all kinds of benchmarks."""

    tasks: list[str] = field(default_factory=list)
    """Tasks by name."""
    factor: Annotated[Number, Field(ge=1, le=1_000_000)] = 1.0
    """Multiple of the training length that methods are set for, and the length of the text they
    choose on; questions keep their length."""
    limit: Count | None = None
    """Questions of a task, the first ones; null: all."""
    max_length: Count | None = None
    """Tokens that the model reads at once, longer contexts lose their beginning; null: the
    training length."""
    batch_tokens: Count = 4096
    """Tokens in a forward pass."""
    add_bos: bool | None = None
    """Begin every text with end-of-text, as training sequences do; null: yes for runs of this
    program, as the tokenizer says for published weights."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of the weights: fp32, bf16; null: bf16 on a GPU, fp32 on a CPU. On a GPU fp32
    multiplies in TF32."""

    @property
    def factors(self) -> list[float]:
        """The single extension factor that methods are set for."""
        return [self.factor]

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        if not self.tasks:
            yield Problem("evaluation.tasks", "expected one or more, for instance [arc_easy,piqa].")
        yield from self.method_problems()
        idle = [part for part in self.parts if part in NEED_A_FACTOR]
        if idle and self.factor == 1:
            yield Problem(
                "evaluation.factor",
                f"1 leaves nothing to do for {', '.join(idle)}; expected how many times the "
                "training length they are set for, for instance 4.",
            )


@configuration
class MultipleChoiceConfig(BenchmarkConfig):
    """Questions from files."""

    directory: OptionalText = None
    """Directory of TASK.jsonl.gz; null: where scripts/fetch_benchmarks.py puts them."""
    unconditional: bool = True
    """Also score answers by how much the question makes them likelier, where the files can;
    doubles the work."""


@configuration
class HarnessConfig(BenchmarkConfig):
    """Tasks of lm-eval, which gets their data from the hub."""

    num_fewshot: Natural | None = None
    """Solved examples before each question; null: as the task says."""
    include_path: OptionalText = None
    """Directory with more tasks; null: none."""
    metadata: FreeForm = field(default_factory=dict)
    """Arguments of tasks that make their questions, such as max_seq_lengths and tokenizer of
    RULER."""


@dataclass(frozen=True)
class Score:
    """One metric of one task: its mean over ``questions``, and the standard error of the mean.

    ``each``: score of every question, higher is better; empty if unknown.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    questions: int
    each: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values without ``each``; null for numbers that are not finite."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
            if key != "each"
        }


@dataclass(frozen=True)
class Scored:
    """Scores of one model with one method: the method's key and title, the model's path."""

    model: str
    method: str
    title: str
    path: str
    scores: list[Score]

    @property
    def name(self) -> str:
        """``SmolLM + YaRN``; the model's name alone if it is unchanged."""
        return self.model if self.method == AS_IS else f"{self.model} + {self.title}"


def comparisons(scored: Scored, others: Sequence[Scored]) -> list[Comparison | None]:
    """Compare every score with a baseline on the same questions.

    The baseline of a method is the same model unchanged. The baseline of an unchanged model is the
    first one. None if the baseline has no scores per question.
    """
    as_is = [other for other in others if other.method == AS_IS]
    if scored.method != AS_IS:
        as_is = [other for other in as_is if other.model == scored.model]
    if not as_is or as_is[0] is scored:
        return [None] * len(scored.scores)
    pairs = zip(scored.scores, as_is[0].scores, strict=True)
    return [
        sign_test(a.each, b.each) if a.each and len(a.each) == len(b.each) else None
        for a, b in pairs
    ]


def mean_score(task: str, metric: str, values: Iterable[float]) -> Score:
    """Return the mean and its standard error from the sample standard deviation."""
    numbers = list(values)
    n, mean = len(numbers), sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (n - 1) if n > 1 else None
    error = None if variance is None else (variance / n) ** 0.5
    return Score(task, metric, mean, error, n, tuple(map(float, numbers)))
