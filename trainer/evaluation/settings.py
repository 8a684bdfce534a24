"""Settings of the methods that fit parameters; imports no torch, so that a mistake in a
configuration is reported at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.evaluation.published_factors import read_factors
from trainer.positional.spectrum import MOST_COEFFICIENT, MOST_EXPONENT


@dataclass(frozen=True)
class TemperatureSettings:
    """Softmax temperature: ``grid`` of coefficients c of 1 + c ln s that is searched, whether s is
    that of the sequence or of each ``query``, and whether it is fitted for all ``models`` or for
    those that are ``free`` of positions, where it is all that is left to choose.
    ``lengths``: multiples of the training length at which it is fitted, whatever is evaluated;
    null: those evaluated. One alone is DroPE's "target length" (App. C.2). ``fit`` at several:
    ``sum`` takes the c of the least loss summed over them, ``line`` the best c of each and, as YaRN
    (Peng et al., whom DroPE follows), the line through the scales 1 + c ln s that they give, by
    least squares; at one length they are the same.
    ``rope_id_coefficient``, ``rope_id_exponent``: of ``temperature_rope_id``, by default those of
    RoPE-ID (App. A.4)."""

    grid: list[float] = field(
        default_factory=lambda: [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    per: Literal["sequence", "query"] = "sequence"
    models: Literal["free", "all"] = "free"
    lengths: list[float] | None = None
    fit: Literal["sum", "line"] = "sum"
    rope_id_coefficient: float = 0.1
    rope_id_exponent: float = 2.0

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if not self.grid or not all(0 <= c <= 100 for c in self.grid):
            found.append(
                Problem(
                    "evaluation.temperature.grid",
                    f"expected one or more coefficients from 0 to 100, got {self.grid}.",
                )
            )
        if self.lengths is not None and not (self.lengths and all(s > 1 for s in self.lengths)):
            found.append(
                Problem(
                    "evaluation.temperature.lengths",
                    "expected multiples of the training length above 1, or null for those "
                    f"evaluated, got {self.lengths}.",
                )
            )
        found += [
            Problem(
                f"evaluation.temperature.{key}", f"expected a number from 0 to {most}, got {value}."
            )
            for key, most in (
                ("rope_id_coefficient", MOST_COEFFICIENT),
                ("rope_id_exponent", MOST_EXPONENT),
            )
            if not 0 <= (value := getattr(self, key)) <= most
        ]
        return found


@dataclass(frozen=True)
class DynamicNtkSettings:
    """``alpha`` of ``dynamic_ntk_alpha``, which slows a sequence of n > C tokens for
    s = alpha n / C - (alpha - 1); null: the length of the evaluation over C, as DoPE has it
    (App. A.2)."""

    alpha: float | None = None

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        if self.alpha is None or 1 <= self.alpha <= 1e6:
            return []
        return [
            Problem(
                "evaluation.dynamic_ntk.alpha",
                "expected a number from 1 to 1,000,000, or null for the length over the training "
                f"length, got {self.alpha}.",
            )
        ]


@dataclass(frozen=True)
class LongRopeSettings:
    """``search``: for the least loss of text (``perplexity``, LongRoPE) or of needles' answers
    (``needles``, LongRoPE2). ``evaluations``: sets of factors that the search tries at each length.
    ``windows``: held-out texts it tries them on. ``factors``: a file of published ones, which are
    then taken as they are; see :func:`~trainer.evaluation.published_factors.read_factors`."""

    search: Literal["perplexity", "needles"] = "perplexity"
    evaluations: int = 64
    windows: int = 4
    seed: int = 0
    factors: str | None = None

    @property
    def of_choice(self) -> dict[str, Any]:
        """All that the factors depend on beside model and text."""
        if self.factors is not None:
            return asdict(read_factors(self.factors))
        found = {"evaluations": self.evaluations, "windows": self.windows, "seed": self.seed}
        return found if self.search == "perplexity" else {"search": self.search, **found}

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"evaluation.longrope.{key}", f"expected 1 or more, got {value}.")
            for key in ("evaluations", "windows")
            if (value := getattr(self, key)) < 1
        ]
        if self.factors is not None:
            try:
                read_factors(self.factors)
            except UserError as error:
                found += error.problems
        return found


@dataclass(frozen=True)
class ChoiceSettings:
    """What ``dope`` chooses heads on and ``weighted_rope`` pairs, whatever is evaluated.

    ``text``: ``validation`` text; a ``file``; or the prompts of a task, made of validation text and
    of another seed than those that are evaluated: one with needles, or with many shots (DoPE,
    Table 4). ``file``: prompts in a ``.jsonl``, a line with ``prompt`` or ``problem``, of which the
    last tokens are read; of any other file, running text.
    ``length``: of a text, a multiple of the training length; null: as long as what is evaluated.
    With a number, the heads are those of an evaluation at that length, its rescaling included
    (Table 3). ``texts``: how many are read.
    """

    text: str = "validation"
    file: str | None = None
    length: float | None = None
    texts: int = 4

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
        if self.length is not None and not 0 < self.length <= 1e6:
            found.append(
                Problem(
                    "evaluation.choice.length",
                    "expected a positive multiple of the training length, or null for the one "
                    f"evaluated, got {self.length}.",
                )
            )
        if self.texts < 1:
            found.append(
                Problem("evaluation.choice.texts", f"expected 1 or more, got {self.texts}.")
            )
        return found


@dataclass(frozen=True)
class DopeSettings:
    """Which heads lose what; the defaults are the paper's best at 64k tokens (Table 1), but for
    fewer heads: it takes 5 of about a thousand.

    ``variant``: ``by_parts`` takes the bands slower than one turn in the training length, those
    with 0 < theta < 2 pi / C (Eq. 33; the figure's reading of Eq. 32), ``by_all`` all of them, and
    ``by_gaussian`` puts noise in the place of the head (Eq. 36 and 37).
    ``by``: entropies of queries, of keys, or of both together (``joint``: of one Gram matrix over
    the queries and the keys). ``entropy``: the mean over the bands (``vanilla``, Eq. 26) or the
    truncated effective rank (``trunc``, Eq. 30) with ``r`` eigenvalues, null for all; with r = 1
    heads are ranked by the largest eigenvalue, the larger the lower their entropy.
    ``stage``: of the encoding, see :mod:`trainer.analysis.matrix_entropy`. ``order``: heads of low
    (``ascending``) or high entropy. ``heads``: how many.
    ``unit``: what a head is. ``head``: a query head with a copy of its keys for itself, of which
    Llama 3 8B has 1,024, as the paper counts (Sec. 5.1). ``group``: a key-value head with all
    queries that read it, whose score is the mean of theirs.
    Queries and keys change both (Eq. 34 to 37). ``removal``, of ``by_parts`` and ``by_all``:
    ``unrotate`` lets the bands stand still, ``zero`` takes them out of the scores. ``sigma``:
    standard deviation of the noise (1 in App. A.2); null: that of what is retained (Sec. 4.3).
    ``seed``: of the noise.
    """

    variant: Literal["by_parts", "by_all", "by_gaussian"] = "by_all"
    by: Literal["query", "key", "joint"] = "query"
    entropy: Literal["vanilla", "trunc"] = "trunc"
    r: int | None = 1
    stage: Literal["pre_ntk", "post_ntk", "post_rope"] = "post_ntk"
    order: Literal["ascending", "descending"] = "ascending"
    heads: int = 1
    unit: Literal["head", "group"] = "head"
    removal: Literal["unrotate", "zero"] = "unrotate"
    sigma: float | None = None
    seed: int = 0

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if self.r is not None and self.r < 1:
            found.append(
                Problem("evaluation.dope.r", f"expected 1 or more, or null for all, got {self.r}.")
            )
        if self.heads < 0:
            found.append(Problem("evaluation.dope.heads", f"expected 0 or more, got {self.heads}."))
        if self.seed < 0:
            found.append(Problem("evaluation.dope.seed", f"expected 0 or more, got {self.seed}."))
        if self.sigma is not None and not 0 <= self.sigma <= 1e6:
            found.append(
                Problem(
                    "evaluation.dope.sigma",
                    "expected a number from 0 on, or null for that of the retained heads, got "
                    f"{self.sigma}.",
                )
            )
        return found


@dataclass(frozen=True)
class WeightedRopeSettings:
    """Pairs whose ``entropy`` (SpectrumFE or SequenceFE) is ``side`` (below or above) the threshold
    ``tau`` are multiplied by ``alpha``."""

    entropy: Literal["spectrum", "sequence"] = "sequence"
    side: Literal["below", "above"] = "below"
    tau: float = 0.6
    alpha: float = 0.1

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        return [
            Problem(
                f"evaluation.weighted_rope.{key}", f"expected a number from 0 to 1, got {value}."
            )
            for key in ("tau", "alpha")
            if not 0 <= (value := getattr(self, key)) <= 1
        ]
