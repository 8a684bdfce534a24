"""Configuration of methods and their settings, shared by every kind of evaluation.

This module imports no torch, so that a configuration error is reported without its start-up time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, field
from typing import Annotated, Literal

from pydantic import Field

from trainer.analysis.settings import USUAL
from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.fields import (
    Count,
    Integer,
    Multiple,
    Natural,
    NotNegative,
    Number,
    Share,
    configuration,
)
from trainer.evaluation.many_shot import LONG_TASKS
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.scoring import list_problems
from trainer.model.config import ModelConfig
from trainer.positional.layout import LayerChoice, LayerEncoding, Layout, layer_problems
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import MOST_COEFFICIENT, MOST_EXPONENT, Spectrum

Length = Annotated[Integer, Field(ge=2, lt=1 << 31)]
"""Tokens of a sequence."""


@configuration
class TemperatureSettings:
    """Softmax temperature 1 + c ln s, fitted on validation text."""

    grid: list[Annotated[NotNegative, Field(le=100)]] = field(
        default_factory=lambda: [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    """Values of c to try; larger ones, up to 2, while the largest is the best."""
    per: Literal["sequence", "query"] = "sequence"
    """Length s counts: sequence, query."""
    models: Literal["free", "all"] = "free"
    """Models it is fitted for: free (those without positions), all."""
    lengths: list[Annotated[Number, Field(gt=1, le=1_000_000)]] | None = None
    """Lengths to fit at, in multiples of the training length (one alone is DroPE's target
    length, App. C.2); null: those evaluated."""
    fit: Literal["sum", "line"] = "sum"
    """How several lengths combine: sum (least sum of their losses), line (through the best scale
    of each, as YaRN)."""
    rope_id_coefficient: Annotated[NotNegative, Field(le=MOST_COEFFICIENT)] = 0.1
    """Coefficient of temperature_rope_id, (1 + 0.1 ln s)^2 in RoPE-ID's App. A.4."""
    rope_id_exponent: Annotated[NotNegative, Field(le=MOST_EXPONENT)] = 2.0
    """Exponent of temperature_rope_id."""

    def problems(self) -> Iterator[Problem]:
        """Check that lists are not empty."""
        for key, values in (("grid", self.grid), ("lengths", self.lengths)):
            if values == []:
                yield Problem(f"evaluation.temperature.{key}", "expected one or more, got none.")


@configuration
class DynamicNtkSettings:
    """Settings of dynamic_ntk_alpha."""

    alpha: Annotated[Number, Field(ge=1, le=1_000_000)] | None = None
    """Slows a sequence of n > C tokens for s = alpha n / C - (alpha - 1); null: the length over
    the training length (DoPE, App. A.2)."""


@configuration
class LongRopeSettings:
    """Settings of longrope."""

    search: Literal["perplexity", "needles"] = "perplexity"
    """What factors are searched for: perplexity (of text, LongRoPE), needles (of their answers,
    LongRoPE2)."""
    evaluations: Count = 64
    """Sets of factors to try at each length."""
    windows: Count = 4
    """Held-out texts to try them on."""
    seed: Natural = 0
    """Seed of the search."""


@configuration
class ChoiceSettings:
    """Text on which dope chooses heads, and weighted_rope pairs."""

    text: str = "validation"
    """validation, or the prompts of a task: standard, noisy, multi_key, multi_query,
    multi_value, many_shot_needle, many_shot_skip."""
    length: Multiple | None = None
    """Length of a text in multiples of the training length; null: the length evaluated."""
    texts: Count = 4
    """Number of texts to read."""

    def problems(self, texts: Collection[str]) -> Iterator[Problem]:
        """Check the text and its file; ``texts``: names of the available texts."""
        if self.text not in texts:
            near = did_you_mean(self.text, texts)
            yield Problem("evaluation.choice.text", f"there is no text {self.text!r}.", near)


@configuration
class DopeSettings:
    """Which heads lose which bands; by default the paper's best at 64k tokens (Table 1) with fewer
    heads."""

    variant: Literal["by_parts", "by_all", "by_gaussian"] = "by_all"
    """What a head loses: by_parts (bands slower than one turn in the training length, Eq. 33),
    by_all (all bands), by_gaussian (noise takes its place, Eq. 36 and 37)."""
    by: Literal["query", "key", "joint"] = "query"
    """Whose entropies rank heads: query, key, joint (of one Gram matrix over both)."""
    entropy: Literal["vanilla", "trunc"] = "trunc"
    """trunc (truncated effective rank, Eq. 30), vanilla (mean over the bands, Eq. 26)."""
    r: Count | None = 1
    """Eigenvalues of trunc; null: all."""
    stage: Literal["pre_ntk", "post_ntk", "post_rope"] = "post_ntk"
    """State of the encoding that is ranked: pre_ntk, post_ntk, post_rope."""
    spectral: Literal["inverse", "share", "norm"] = "inverse"
    """What ranks heads with entropy=trunc and r=1, where Eq. 30 is 1 for all: inverse (1 over the
    largest eigenvalue's share, so that ascending begins with low entropy), share, norm (the
    largest eigenvalue itself)."""
    order: Literal["ascending", "descending"] = "ascending"
    """ascending (heads of low entropy first), descending."""
    heads: Natural = 1
    """Number of heads; the paper takes 5 of about a thousand."""
    removal: Literal["unrotate", "zero"] = "unrotate"
    """How bands are removed: unrotate (they stand still), zero (they leave the scores)."""
    sigma: Annotated[NotNegative, Field(le=1_000_000)] | None = None
    """Standard deviation of the noise; null: as in the retained heads (Sec. 4.3)."""
    seed: Natural = 0
    """Seed of the noise."""

    def problems(self) -> Iterator[Problem]:
        """Check that ``spectral`` is set only for settings that it affects."""
        if self.spectral != "inverse" and (self.entropy, self.r) != ("trunc", 1):
            yield Problem(
                "evaluation.dope.spectral",
                f"{self.spectral!r} is for evaluation.dope.entropy=trunc with evaluation.dope.r=1, "
                f"got {self.entropy} with r={self.r}; expected inverse.",
            )


@configuration
class WeightedRopeSettings:
    """A rule that multiplies pairs by alpha, chosen by their entropy."""

    entropy: Literal["spectrum", "sequence"] = "sequence"
    """Entropy that chooses: spectrum (SpectrumFE), sequence (SequenceFE)."""
    side: Literal["below", "above"] = "below"
    """Side of the threshold: below, above."""
    tau: Share = 0.6
    """Threshold of the entropy."""
    alpha: Share = 0.1
    """Factor on the pairs."""


METHODS = (
    *("none", "crop", "pi", "ntk", "dynamic_ntk", "yarn", "longrope"),
    *("dope", "weighted_rope", "temperature"),
)
BY_LAYER = (
    *RESCALINGS,
    *(f"dynamic_{name}" for name in RESCALINGS),
    *("dynamic_ntk_alpha", "longrope", "temperature", "temperature_rope_id"),
)
"""Parts that change only the layers of ``evaluation.layers``."""
PARTS = (
    *("none", "crop", "window"),
    *BY_LAYER,
    *("dope", "weighted_rope", "drop"),
)
"""Parts of methods, which ``evaluation.methods`` joins by ``+``."""

ON_TEXT = ("longrope", "temperature", "dope", "weighted_rope")
"""Parts that choose something on validation text."""

LAYERS_KEY = "evaluation.layers"
SHORTEST = {"sequence": 6, "spectrum": USUAL.frame}
"""Tokens that the entropies of ``evaluation.weighted_rope`` need."""


def choice_texts() -> tuple[str, ...]:
    """Return the names for ``evaluation.choice.text``, including those of plugins."""
    return ("validation", *NEEDLE_TASKS, *LONG_TASKS)


@configuration
class MethodsConfig(ABC):
    """Methods and their settings, the same in every kind of evaluation."""

    _: KW_ONLY
    training_length: Length | None = None
    """C, in tokens: the unit of lengths, and where methods begin; null: the sequences that a run
    trained on last, or what a published model's configuration says."""
    methods: list[str] | None = field(default_factory=lambda: ["none"])
    """Methods, several joined by + from left to right (yarn+dope); null: none, crop, pi, ntk,
    dynamic_ntk, yarn, longrope, dope, weighted_rope and temperature, if they change a
    checkpoint. Others: window, ntk_by_parts, yarn_full_range, llama3, ntk_by_parts_turns,
    yarn_turns, dynamic_..., dynamic_ntk_alpha, temperature_rope_id, drop."""
    fit_windows: Count = 32
    """Windows of validation text for fits."""
    layers: LayerChoice = None
    """Layers that rescalings and temperatures change: all, full_attention (those without a
    window), or indices, [3,7]; null: the layers that see more than the training length."""
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    """Settings of temperature, 1 + c ln s with s the length in training lengths."""
    dynamic_ntk: DynamicNtkSettings = field(default_factory=DynamicNtkSettings)
    """Settings of dynamic_ntk_alpha."""
    longrope: LongRopeSettings = field(default_factory=LongRopeSettings)
    """Settings of longrope."""
    choice: ChoiceSettings = field(default_factory=ChoiceSettings)
    """What dope chooses heads on and weighted_rope pairs."""
    dope: DopeSettings = field(default_factory=DopeSettings)
    """Settings of dope."""
    weighted_rope: list[WeightedRopeSettings] = field(
        default_factory=lambda: [WeightedRopeSettings()]
    )
    """Rules of weighted_rope. The paper adds {entropy: spectrum, side: above, tau: 0.4, alpha:
    0.1}; +evaluation=weighted_rope has both."""

    @property
    @abstractmethod
    def factors(self) -> list[float]:
        """Extension factors that methods are set for."""

    @property
    def names(self) -> list[str]:
        """Requested methods."""
        return list(METHODS) if self.methods is None else self.methods

    @property
    def parts(self) -> list[str]:
        """Their parts, without duplicates."""
        return list(dict.fromkeys(part for name in self.names for part in name.split("+")))

    def method_problems(self) -> Iterator[Problem]:
        """Check the methods and their settings."""
        yield from list_problems("evaluation.methods", self.names)
        yield from layer_problems(LAYERS_KEY, self.layers)
        intervenes = self.dope.removal == "zero" or self.dope.variant == "by_gaussian"
        for name in self.names:
            yield from part_problems(name)
            if intervenes and {"dope", "weighted_rope"} <= {*name.split("+")}:
                yield Problem(
                    "evaluation.methods",
                    f"in {name!r} both parts change the same heads, which does not combine; "
                    "name them one by one, or set evaluation.dope.removal=unrotate with "
                    "another variant than by_gaussian.",
                )
        if "weighted_rope" in self.parts and not self.weighted_rope:
            yield Problem("evaluation.weighted_rope", "expected one rule or more, got none.")
        for group in (self.temperature, self.dope):
            yield from group.problems()
        yield from self.choice.problems(choice_texts())

    def choice_problems(self, training_length: int, methods: Sequence[str]) -> Iterator[Problem]:
        """Check that these methods can choose on the text, for models of that training length."""
        parts = {part for name in methods for part in name.split("+")}
        if "temperature" in parts:
            for length in self.temperature.lengths or []:
                if round(length * training_length) <= training_length:
                    yield Problem(
                        "evaluation.temperature.lengths",
                        f"{length:g} times the training length of {training_length} tokens is no "
                        "more than that; nothing is fitted there.",
                    )
        rules = self.weighted_rope if "weighted_rope" in parts else ()
        least = max((2, *(SHORTEST[rule.entropy] for rule in rules)))
        shortest = min(self.factors) if self.choice.length is None else self.choice.length
        tokens = round(shortest * training_length)
        if parts & {"dope", "weighted_rope"} and tokens < least:
            yield Problem(
                "evaluation.choice.length",
                f"a text to choose on has {least:,} tokens or more, and {shortest:g} times the "
                f"training length of {training_length} is {tokens}; here that is "
                f"{least / training_length:.3g} or more.",
            )


def part_problems(name: str) -> list[Problem]:
    """Check the parts of a method's name."""
    parts = name.split("+")
    problems = [
        Problem("evaluation.methods", f"unknown method {part!r}.", did_you_mean(part, PARTS))
        for part in parts
        if part not in PARTS
    ]
    if len(set(parts)) < len(parts) or ("none" in parts and len(parts) > 1):
        problems.append(
            Problem("evaluation.methods", f"{name!r} does one thing twice, or 'none' and more.")
        )
    return problems


def rotating_heads(layout: Layout, config: ModelConfig) -> list[tuple[int, int]]:
    """Return layer and index of every query head that rotates."""
    count = config.num_attention_heads
    return [
        (layer, head)
        for layer, encoding in enumerate(layout.layers)
        for head in range(count)
        if spectrum_of(encoding, head, count).rotates
    ]


def check_heads(layout: Layout, config: ModelConfig, settings: DopeSettings) -> None:
    """Check that the model has enough rotating heads; this needs no weights."""
    available = len(rotating_heads(layout, config))
    if settings.heads > available:
        raise UserError(
            f"evaluation.dope.heads: expected at most {available}, the query heads that rotate, "
            f"got {settings.heads}"
        )


def spectrum_of(encoding: LayerEncoding, head: int, count: int) -> Spectrum:
    """Return the spectrum of query head ``head`` out of ``count``."""
    return encoding.spectra[head // (count // len(encoding.spectra))]
