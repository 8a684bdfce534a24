"""Settings of the methods that fit parameters; imports no torch, so that a mistake in a
configuration is reported at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.fields import (
    Count,
    Multiple,
    Natural,
    NotNegative,
    Number,
    OptionalText,
    Share,
    configuration,
)
from trainer.evaluation.published_factors import read_factors
from trainer.positional.spectrum import MOST_COEFFICIENT, MOST_EXPONENT


@configuration
class TemperatureSettings:
    """Softmax temperature 1 + c ln s, fitted on validation text."""

    grid: list[Annotated[NotNegative, Field(le=100)]] = field(
        default_factory=lambda: [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    """Values of c to choose from."""
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

    def problems(self) -> list[Problem]:
        """Return what is impossible."""
        given = {"grid": self.grid, "lengths": self.lengths}
        return [
            Problem(f"evaluation.temperature.{key}", "expected one or more, got none.")
            for key, values in given.items()
            if values == []
        ]


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
    factors: OptionalText = None
    """JSON file of published factors, the rope_scaling of a Hugging Face config.json; null:
    search."""

    @property
    def of_choice(self) -> dict[str, Any]:
        """Return everything that the factors depend on besides model and text."""
        if self.factors is not None:
            return asdict(read_factors(self.factors))
        found = {"evaluations": self.evaluations, "windows": self.windows, "seed": self.seed}
        return found if self.search == "perplexity" else {"search": self.search, **found}

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        try:
            if self.factors is not None:
                read_factors(self.factors)
        except UserError as error:
            return [*error.problems]
        return []


@configuration
class ChoiceSettings:
    """What dope chooses heads on and weighted_rope pairs."""

    text: str = "validation"
    """validation, file, or the prompts of a task: standard, noisy, multi_key, multi_query,
    multi_value, passkey, many_shot_needle, many_shot_skip."""
    file: OptionalText = None
    """File for text=file: a .jsonl of prompts (prompt or problem), or running text."""
    length: Multiple | None = None
    """Length of a text in multiples of the training length; null: the length evaluated."""
    texts: Count = 4
    """Number of texts to read."""

    def problems(self, texts: Collection[str]) -> list[Problem]:
        """What is impossible, one sentence each; ``texts``: what there is."""
        found = []
        if self.text not in texts:
            near = did_you_mean(self.text, texts)
            found.append(
                Problem("evaluation.choice.text", f"there is no text {self.text!r}.", near)
            )
        if (self.text == "file") != (self.file is not None):
            found.append(
                Problem(
                    "evaluation.choice.file",
                    "expected a file where evaluation.choice.text is 'file', and null elsewhere, "
                    f"got {self.file!r} with {self.text!r}.",
                )
            )
        elif self.file is not None and not Path(self.file).is_file():
            found.append(Problem("evaluation.choice.file", f"there is no file {self.file!r}."))
        return found


@configuration
class DopeSettings:
    """Which heads lose what; by default the paper's best at 64k tokens (Table 1), fewer heads."""

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
    unit: Literal["head", "group"] = "head"
    """What counts as a head: head (a query head with its keys, as the paper counts), group (a
    key-value head with its queries)."""
    removal: Literal["unrotate", "zero"] = "unrotate"
    """How bands are removed: unrotate (they stand still), zero (they leave the scores)."""
    sigma: Annotated[NotNegative, Field(le=1_000_000)] | None = None
    """Standard deviation of the noise; null: that of the retained heads (Sec. 4.3)."""
    seed: Natural = 0
    """Seed of the noise."""

    def problems(self) -> list[Problem]:
        """Check that ``spectral`` is set only for what it affects."""
        if self.spectral == "inverse" or (self.entropy, self.r) == ("trunc", 1):
            return []
        return [
            Problem(
                "evaluation.dope.spectral",
                f"{self.spectral!r} is for evaluation.dope.entropy=trunc with evaluation.dope.r=1, "
                f"got {self.entropy} with r={self.r}; expected inverse.",
            )
        ]


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
