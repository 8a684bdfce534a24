"""What the ``evaluate`` command is asked for, by the kind of evaluation."""

from __future__ import annotations

from dataclasses import field
from importlib.util import find_spec

from trainer.common.errors import Problem
from trainer.common.fields import OptionalText, Processes, configuration
from trainer.data.config import DataConfig
from trainer.evaluation.benchmarks import BenchmarkConfig, HarnessConfig, MultipleChoiceConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import ON_TEXT
from trainer.workflows.request import request_problems


@configuration
class ModelsRequest:
    """The keys that all kinds of evaluation have."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, a published model's directory or .gguf file, or
    hf:DIRECTORY of a model that transformers is to compute."""
    compare: list[str] = field(default_factory=list)
    """More models, measured on the same trials."""
    output: OptionalText = None
    """Directory of the report and its finished cells, NAME-2 beside it for other settings; null:
    evaluation in the run, or lengths/NAME with +evaluation=NAME; runs/ITS_NAME for a published
    model."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""
    text: DataConfig | None = None
    """Where held-out text comes from, for kinds that read some; null: the first checkpoint's own
    source."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register needle tasks of your own."""


@configuration
class EvaluationRequest(ModelsRequest):
    """Methods, tasks and lengths, for models of the same tokenizer and training length."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Methods, tasks and lengths."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        common = request_problems(self.checkpoint, self.text)
        return self.evaluation.problems() + common


@configuration
class BenchmarkRequest(ModelsRequest):
    """Benchmarks, which bring their own text; methods may choose something on another."""

    evaluation: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    """Tasks and methods."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = self.evaluation.problems()
        found += request_problems(self.checkpoint, self.text)
        if self.text is not None and not set(self.evaluation.parts) & set(ON_TEXT):
            found.append(
                Problem(
                    "text",
                    "this evaluation reads text of its own; a method that chooses something "
                    f"reads another ({', '.join(ON_TEXT)}), and so does +evaluation=extension.",
                )
            )
        return found


@configuration
class MultipleChoiceRequest(BenchmarkRequest):
    """Questions from files."""

    evaluation: MultipleChoiceConfig = field(default_factory=MultipleChoiceConfig)
    """Tasks and methods."""


@configuration
class HarnessRequest(BenchmarkRequest):
    """Tasks of lm-eval."""

    evaluation: HarnessConfig = field(default_factory=HarnessConfig)
    """Tasks and methods."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = super().problems()
        if find_spec("lm_eval") is None:
            found.append(
                Problem("evaluation", "lm-eval is not installed; pip install 'unrope[eval]'.")
            )
        return found
