"""Names and settings of analyses. Imports no torch, so that ``--help`` and configuration errors
come fast."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainer.errors import did_you_mean

ALL, DROP, OFFSETS = "all", "drop", "offset_features"
COMPARING = (DROP, OFFSETS, ALL)
"""Those that show another model beside the one that is analysed."""
ANALYSES = [
    "clusters",
    "sinks",
    "synthetic",
    "frequency_entropy",
    OFFSETS,
    "matrix_entropy",
    "positional_bias",
]
"""Of one model, in the order of a page; plugins add theirs."""


def kinds() -> tuple[str, ...]:
    """Return all values of ``analysis.kind``: one analysis, ``all``, or ``drop``, which compares
    two models."""
    return (ALL, *ANALYSES, DROP)


WINDOWS = ("hann", "hamming", "blackman", "rectangular")


@dataclass(frozen=True)
class ShortTime:
    """Frames of the short-time transform.

    ``frame``: tokens of a frame. ``hop``: tokens from one frame to the next (None: half a frame).
    ``window``: the taper of a frame. The paper on frequency entropy uses 1,024 and 512 tokens and
    does not name the window.
    """

    window: str = "hann"
    frame: int = 1024
    hop: int | None = None

    @property
    def step(self) -> int:
        """Tokens from one frame to the next."""
        return self.hop or self.frame // 2

    def problems(self) -> list[str]:
        """Return a sentence for each invalid value, with keys relative to the frames' own key."""
        problems = []
        if self.window not in WINDOWS:
            near = did_you_mean(self.window, WINDOWS)
            problems.append(
                f"window: expected one of {', '.join(WINDOWS)}, got {self.window!r}.{near}"
            )
        if self.frame < 2:
            problems.append(f"frame: expected 2 tokens or more, got {self.frame}.")
        elif self.hop is not None and not 1 <= self.hop <= self.frame:
            problems.append(f"hop: expected 1 to {self.frame} tokens, a frame, got {self.hop}.")
        return problems


USUAL = ShortTime()


Rule = tuple[str, Literal["below", "above"], float]
"""Which entropy, on which side of which threshold."""
GATE = re.compile(r"(spectrum|sequence)\s*([<>])\s*(0?\.\d+|[01](?:\.\d*)?)")


def rules(gate: str) -> tuple[Rule, ...]:
    """Parse a gate such as ``spectrum>0.4+sequence<0.6``, which selects the pairs of all its rules.

    Raises:
        ValueError: the gate is malformed.
    """
    parsed: list[Rule] = []
    for part in gate.split("+"):
        if not (match := GATE.fullmatch(part.strip())):
            raise ValueError(gate)
        measure, sign, tau = match.groups()
        parsed.append((measure, "below" if sign == "<" else "above", float(tau)))
    return tuple(parsed)


@dataclass(frozen=True)
class AttenuationSettings:
    """Perplexity by the factor on pairs of extreme frequency entropy (Frequency Entropy, Fig. 4).

    ``alphas``: the factors; empty: skip the measurement. ``gates``: which pairs, see :func:`rules`.
    ``choice``: the text whose entropies select the pairs: the ``page``'s text, on which perplexity
    is measured too, or separate ``validation`` text. ``choice_length``: tokens of that text (null:
    as many as the page has). ``tokens``: lengths of the prefixes whose perplexity is measured, one
    after the other (null: the whole text). ``texts``: number of the page's texts to measure.
    """

    alphas: list[float] = field(default_factory=lambda: [0.0, 0.5, 0.9])
    gates: list[str] = field(
        default_factory=lambda: ["spectrum<0.2", "spectrum>0.4", "sequence<0.6"]
    )
    choice: Literal["page", "validation"] = "page"
    choice_length: int | None = None
    tokens: list[int] | None = field(default_factory=lambda: [1024])
    texts: int = 1

    def problems(self) -> list[str]:
        """Return a sentence for each invalid value."""
        problems = []
        if not all(0 <= alpha <= 1 for alpha in self.alphas):
            problems.append(
                "analysis.attenuation.alphas: expected numbers from 0 to 1, got "
                f"{list(self.alphas)}."
            )
        for gate in self.gates:
            try:
                rules(gate)
            except ValueError:
                problems.append(
                    "analysis.attenuation.gates: expected an entropy and its threshold, as in "
                    f"'spectrum<0.2' or 'spectrum>0.4+sequence<0.6', got {gate!r}."
                )
        if self.choice_length is not None and self.choice_length < 6:
            problems.append(
                "analysis.attenuation.choice_length: expected 6 tokens or more, got "
                f"{self.choice_length}."
            )
        if self.tokens is not None and (not self.tokens or min(self.tokens) < 1):
            problems.append(
                "analysis.attenuation.tokens: expected numbers of tokens, or null for all, got "
                f"{self.tokens}."
            )
        if self.texts < 1:
            problems.append(f"analysis.attenuation.texts: expected 1 or more, got {self.texts}.")
        return problems


@dataclass(frozen=True)
class NeedleSettings:
    """The needle with which the attention of heads of extreme matrix entropy is shown (DoPE, Fig. 2
    to 6).

    ``kind``: ``copy``: repeat the end of the text at a tenth of it, which needs no words;
    ``question``: write a statement and end the text with the question for it. ``depth``: where the
    statement is, from 0 (beginning) to 1 (end). ``by``: rank heads by the entropies of their
    queries or of the keys that they read. ``ranked_on``: measure these entropies in the page's
    ``text`` or in the ``prompt`` with the needle.
    """

    kind: Literal["copy", "question"] = "copy"
    depth: float = 0.1
    by: Literal["query", "key"] = "query"
    ranked_on: Literal["text", "prompt"] = "text"

    def problems(self) -> list[str]:
        """Return a sentence for each invalid value."""
        if 0 <= self.depth <= 1:
            return []
        return [
            "analysis.needle.depth: expected a number from 0 (beginning) to 1 (end), got "
            f"{self.depth}."
        ]
