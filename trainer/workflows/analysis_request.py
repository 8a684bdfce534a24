"""What ``analyze`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.analysis.names import ALL, kinds
from trainer.analysis.settings import AttenuationSettings, NeedleSettings
from trainer.analysis.short_time import ShortTime
from trainer.common.errors import Problem, did_you_mean
from trainer.data.config import DataConfig
from trainer.evaluation.method_config import ON_TEXT, part_problems
from trainer.workflows.request import request_problems


@dataclass(frozen=True)
class AnalysisConfig:
    """``kind``: which analysis, or all that the model has the structure for. ``length``: tokens of
    a text, the beginning-of-text token included (null: 8 times the training length, but no more
    than 4,096 or twice it, and no more than there is text). ``texts``: how many are read together
    (null: as many as make 4,096 tokens, at most 16). ``chosen``: [layer, query head] pairs that
    pictures of single heads show (empty: found by their measures). ``pairs``: rotary pairs that
    pictures of ``offset_features`` show one by one (empty: all of a head, or found). ``dtype``: of
    the weights. ``seed``: of subsamples. ``frequency_entropy``: the frames of its SpectrumFE.
    ``prefixes``: tokens of shorter texts, the first ones of each, at which frequency entropies are
    shown as well (Frequency Entropy, App. F). ``attenuation``: of pairs of extreme frequency
    entropy. ``needle``: for heads of extreme matrix entropy. ``method``: what is done first to the
    layout of the model, for texts of this length: one of the names of ``evaluation.methods`` that
    chooses nothing on text, or several joined by ``+`` (null: nothing). ``file``: a text that is
    read in place of held-out text, whole unless ``length`` says less."""

    kind: str = ALL
    length: int | None = None
    texts: int | None = None
    chosen: list[list[int]] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    frequency_entropy: ShortTime = field(default_factory=ShortTime)
    prefixes: list[int] = field(default_factory=list)
    attenuation: AttenuationSettings = field(default_factory=AttenuationSettings)
    needle: NeedleSettings = field(default_factory=NeedleSettings)
    method: str | None = None
    file: str | None = None

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"analysis.{key}", f"expected {least} or more, got {value}.")
            for key, least in (("length", 2), ("texts", 1))
            if (value := getattr(self, key)) is not None and value < least
        ]
        if self.kind not in kinds():
            near = did_you_mean(self.kind, kinds())
            found.append(Problem("analysis.kind", f"there is no analysis {self.kind!r}.", near))
        found += [
            Problem("analysis.chosen", f"expected pairs [layer, head], got {pair}.")
            for pair in self.chosen
            if len(pair) != 2
        ]
        if self.prefixes and min(self.prefixes) < 6:
            found.append(
                Problem("analysis.prefixes", f"expected 6 tokens or more, got {self.prefixes}.")
            )
        of_frames = self.frequency_entropy.problems()
        found += [problem.under("analysis.frequency_entropy") for problem in of_frames]
        found += self._method_problems()
        return found + self.attenuation.problems() + self.needle.problems()

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


@dataclass(frozen=True)
class AnalysisRequest:
    """What ``analyze`` is asked for.

    ``checkpoint``: a run directory, a checkpoint, or a published model's directory or ``.gguf``
    file, or ``hf:DIRECTORY`` of a model that transformers is to compute. ``compare``: the model
    before the drop, for ``drop`` (null: the run's own checkpoint from just before it), or another
    model beside this one, for ``offset_features``. ``output``:
    null for ``analysis/NAME`` in the run, for a published model here. ``text``: where held-out text
    comes from (null: the checkpoint's own source). ``plugins``: Python files that register
    analyses.
    """

    checkpoint: str | None = None
    compare: str | None = None
    output: str | None = None
    threads: int | None = None
    text: DataConfig | None = None
    plugins: list[str] = field(default_factory=list)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        common = request_problems(self.checkpoint, self.threads, self.text)
        return self.analysis.problems() + common
