"""Requests of the commands about finished models and text.

They stand apart from their workflows, which import torch: a mistake in a request is reported before
torch is imported.
"""

from __future__ import annotations

from dataclasses import field
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainer.analysis.settings import ALL, AttenuationSettings, NeedleSettings, ShortTime, kinds
from trainer.common.errors import Problem, did_you_mean
from trainer.common.fields import (
    Count,
    Integer,
    Natural,
    NotNegative,
    Number,
    OptionalText,
    Positive,
    Processes,
    configuration,
)
from trainer.data.config import DataConfig
from trainer.evaluation.benchmarks import BenchmarkConfig, HarnessConfig, MultipleChoiceConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import ON_TEXT, part_problems
from trainer.model.config import Sampling
from trainer.positional.layout import LayerChoice, layer_problems


def request_problems(checkpoint: str | None, text: DataConfig | None = None) -> list[Problem]:
    """Check the keys that the requests share."""
    problems = [] if text is None else [p.renamed({"data": "text"}) for p in text.problems()]
    if not checkpoint:
        problems.append(Problem("checkpoint", "give checkpoint=runs/NAME, or a checkpoint in it."))
    return problems


@configuration
class ModelsRequest:
    """The keys that all kinds of evaluation have."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, a published model's directory, or
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
        """Check the values."""
        return self.evaluation.problems() + request_problems(self.checkpoint, self.text)


@configuration
class BenchmarkRequest(ModelsRequest):
    """Benchmarks, which bring their own text; methods may choose something on another."""

    evaluation: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    """Tasks and methods."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        problems = self.evaluation.problems() + request_problems(self.checkpoint, self.text)
        if self.text is not None and not set(self.evaluation.parts) & set(ON_TEXT):
            problems.append(
                Problem(
                    "text",
                    "this evaluation reads text of its own; a method that chooses something "
                    f"reads another ({', '.join(ON_TEXT)}), and so does +evaluation=extension.",
                )
            )
        return problems


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
        """Check the values."""
        problems = super().problems()
        if find_spec("lm_eval") is None:
            problems.append(
                Problem("evaluation", "lm-eval is not installed; pip install 'unrope[eval]'.")
            )
        return problems


Pair = Annotated[list[Integer], Field(min_length=2, max_length=2)]
LAYERS_KEY = "analysis.layers"


@configuration
class AnalysisConfig:
    """Which analysis, of which text."""

    kind: str = ALL
    """An analysis by name, or all that the model has the structure for."""
    length: Annotated[Count, Field(ge=2)] | None = None
    """Tokens of a text with its beginning-of-text token; null: 8 times the training length, but
    no more than 4,096 or twice it, and no more than there is text."""
    texts: Count | None = None
    """Texts read together; null: as many as make 4,096 tokens, at most 16."""
    chosen: list[Pair] = field(default_factory=list)
    """Pairs [layer, query head] to show as single heads; []: found by their measures."""
    pairs: list[Natural] = field(default_factory=list)
    """Rotary pairs that pictures of offset_features show one by one; []: all of a head, or
    found."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights: fp32, bf16."""
    seed: Natural = 0
    """Seed of subsamples."""
    frequency_entropy: ShortTime = field(default_factory=ShortTime)
    """Frames of SpectrumFE."""
    prefixes: list[Annotated[Count, Field(ge=6)]] = field(default_factory=list)
    """Numbers of first tokens at which frequency entropies are shown as well (Frequency Entropy,
    App. F)."""
    attenuation: AttenuationSettings = field(default_factory=AttenuationSettings)
    """Perplexity by the factor on pairs of extreme frequency entropy."""
    needle: NeedleSettings = field(default_factory=NeedleSettings)
    """The needle that heads of extreme matrix entropy are shown with."""
    method: OptionalText = None
    """Method applied to the model's layout first, named as in evaluation.methods and needing no
    text: pi, yarn, dynamic_ntk_alpha, ...; null: none."""
    layers: LayerChoice = None
    """Layers that the method changes: all, full_attention (those without a window), or indices;
    null: the layers that see more than the training length."""
    file: OptionalText = None
    """Text to read as a whole in place of held-out text; null: held-out text."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        problems = []
        if self.kind not in kinds():
            near = did_you_mean(self.kind, kinds())
            problems.append(Problem("analysis.kind", f"there is no analysis {self.kind!r}.", near))
        problems += [
            problem.under("analysis.frequency_entropy")
            for problem in self.frequency_entropy.problems()
        ]
        return problems + self._method_problems() + self.attenuation.problems()

    def _method_problems(self) -> list[Problem]:
        problems = layer_problems(LAYERS_KEY, self.layers)
        if self.method is None:
            return problems
        problems += [
            Problem(
                "analysis.method",
                f"{part!r} needs text or another reading of the model; expected one of the "
                "methods that change its layout alone, such as pi, yarn or dynamic_ntk_alpha.",
            )
            for part in self.method.split("+")
            if part in (*ON_TEXT, "crop", "none")
        ]
        keys = {"evaluation.methods": "analysis.method"}
        return problems or [problem.renamed(keys) for problem in part_problems(self.method)]


@configuration
class AnalysisRequest:
    """Request of the analyze command."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, a published model's directory, or
    hf:DIRECTORY of a model that transformers is to compute."""
    compare: OptionalText = None
    """Model before the drop, for drop (null: the run's checkpoint from just before it), or
    another model, for offset_features."""
    output: OptionalText = None
    """Directory of the page; null: analysis/NAME in the run, or in runs/ITS_NAME for a published
    model."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""
    text: DataConfig | None = None
    """Where held-out text comes from; null: the checkpoint's own source."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register analyses of your own."""
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    """Which analysis, of which text."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        return self.analysis.problems() + request_problems(self.checkpoint, self.text)


def _with_newlines(text: str) -> str:
    r"""Replace ``\n``, which Hydra leaves as it is in a word, by a newline."""
    return text.replace("\\n", "\n")


@configuration
class GenerationRequest:
    """Request of the generate command."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, or a published model."""
    prompts: list[str] = field(default_factory=list)
    """Texts to continue; prompt=... adds one, whatever characters are in it."""
    max_new_tokens: Annotated[Count, Field(le=1 << 24)] = 128
    """Most tokens of a continuation."""
    temperature: NotNegative = 0.0
    """Divides the logits; 0: always the likeliest token."""
    top_p: Annotated[Positive, Field(le=1)] = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    stop: list[Annotated[str, AfterValidator(_with_newlines)]] = field(default_factory=list)
    """Strings that end a continuation and are not shown, for instance 'stop=["\\n"]'."""
    seed: Natural = 0
    """Seed of the draws."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of the weights: fp32, bf16; null: bf16 on a GPU, fp32 on a CPU."""
    stream: bool = True
    """Show a single continuation while it grows."""

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters."""
        return Sampling(self.temperature, self.top_p, self.seed)

    def problems(self) -> list[Problem]:
        """Check the values."""
        problems = request_problems(self.checkpoint)
        if not self.prompts:
            problems.append(
                Problem("prompt", "give prompt='Once upon a time', once or several times.")
            )
        if "" in self.stop:
            problems.append(Problem("stop", "an empty string would stop before the first token."))
        return problems


@configuration
class ExportRequest:
    """Request of the export command."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, or a published model or an earlier export to write anew."""
    to: OptionalText = None
    """Directory to write, new or empty."""
    tolerance: NotNegative = 1e-4
    """How far logits may differ in float32, as a share of the largest."""
    temperature_at: Annotated[Number, Field(gt=1, le=1_000_000)] | None = None
    """Length in training lengths whose fitted temperature the weights get, constant at all
    lengths; null: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights: float32, bfloat16 (half the size)."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        problems = request_problems(self.checkpoint)
        if not self.to:
            problems.append(Problem("to", "give to=DIRECTORY, new or empty."))
        return problems


@configuration
class CompareRequest:
    """Request of the compare command."""

    runs: list[str] = field(default_factory=list)
    """Run directories, or the directory of a sweep, which stands for its runs."""
    output: OptionalText = None
    """Directory of the comparison; null: the sweep's, or one below multirun
    with what the runs' names begin with."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        if self.runs:
            return []
        return [Problem("runs", "give run directories, or that of a sweep: compare runs/a runs/b.")]
