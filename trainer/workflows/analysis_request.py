"""What ``analyze`` is asked for."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from trainer.analysis.names import ALL, kinds
from trainer.analysis.settings import AttenuationSettings, NeedleSettings
from trainer.analysis.short_time import ShortTime
from trainer.common.errors import Problem, did_you_mean
from trainer.common.fields import Count, Integer, Natural, OptionalText, Processes, configuration
from trainer.data.config import DataConfig
from trainer.evaluation.method_config import ON_TEXT, part_problems
from trainer.workflows.request import request_problems

Pair = Annotated[list[Integer], Field(min_length=2, max_length=2)]


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
    file: OptionalText = None
    """Text to read as a whole in place of held-out text; null: held-out text."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if self.kind not in kinds():
            near = did_you_mean(self.kind, kinds())
            found.append(Problem("analysis.kind", f"there is no analysis {self.kind!r}.", near))
        of_frames = self.frequency_entropy.problems()
        found += [problem.under("analysis.frequency_entropy") for problem in of_frames]
        found += self._method_problems()
        return found + self.attenuation.problems()

    def _method_problems(self) -> list[Problem]:
        if self.method is None:
            return []
        found = [
            Problem(
                "analysis.method",
                f"{part!r} needs text or another reading of the model; expected one of the "
                "methods that change its layout alone, such as pi, yarn or dynamic_ntk_alpha.",
            )
            for part in self.method.split("+")
            if part in (*ON_TEXT, "crop", "none")
        ]
        keys = {"evaluation.methods": "analysis.method"}
        return found or [problem.renamed(keys) for problem in part_problems(self.method)]


@configuration
class AnalysisRequest:
    """What the analyze command is asked for."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, a published model's directory or .gguf file, or
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
        """What is impossible, one sentence each."""
        common = request_problems(self.checkpoint, self.text)
        return self.analysis.problems() + common
