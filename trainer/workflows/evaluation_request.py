"""What the ``evaluate`` command is asked for, by the kind of evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from trainer.common.errors import Problem
from trainer.data.config import DataConfig
from trainer.evaluation.benchmarks import BenchmarkConfig, HarnessConfig, MultipleChoiceConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import ON_TEXT
from trainer.workflows.request import request_problems


@dataclass(frozen=True)
class ModelsRequest:
    """The keys that all kinds have.

    ``checkpoint``: a run directory, a checkpoint, or a published model's directory or ``.gguf``
    file, or ``hf:DIRECTORY`` of a model that transformers is to compute. ``compare``: more of them.
    ``output``: where the report goes (null: into the run, for a published model here). ``text``:
    where held-out text comes from, for kinds that read some (null: the first checkpoint's own
    source). ``plugins``: Python files that register needle tasks.
    """

    checkpoint: str | None = None
    compare: list[str] = field(default_factory=list)
    output: str | None = None
    threads: int | None = None
    text: DataConfig | None = None
    plugins: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluationRequest(ModelsRequest):
    """Methods, tasks and lengths, for models of the same tokenizer and training length."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        common = request_problems(self.checkpoint, self.threads, self.text)
        return self.evaluation.problems() + common


@dataclass(frozen=True)
class BenchmarkRequest(ModelsRequest):
    """Benchmarks, which bring their own text; methods may choose something on another."""

    evaluation: BenchmarkConfig = field(default_factory=BenchmarkConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = self.evaluation.problems()
        found += request_problems(self.checkpoint, self.threads, self.text)
        if self.text is not None and not set(self.evaluation.parts) & set(ON_TEXT):
            found.append(
                Problem(
                    "text",
                    "this evaluation reads text of its own; a method that chooses something "
                    f"reads another ({', '.join(ON_TEXT)}), and so does +evaluation=extension.",
                )
            )
        return found


@dataclass(frozen=True)
class MultipleChoiceRequest(BenchmarkRequest):
    """Questions from files."""

    evaluation: MultipleChoiceConfig = field(default_factory=MultipleChoiceConfig)


@dataclass(frozen=True)
class HarnessRequest(BenchmarkRequest):
    """Tasks of lm-eval."""

    evaluation: HarnessConfig = field(default_factory=HarnessConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = super().problems()
        if find_spec("lm_eval") is None:
            found.append(
                Problem("evaluation", "lm-eval is not installed; pip install 'unrope[eval]'.")
            )
        return found
