"""Names and settings of analyses. Imports no torch, so that ``--help`` and configuration errors
come fast."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from trainer.common.errors import Problem
from trainer.common.fields import Count, Share, configuration

ALL, DROP, OFFSETS = "all", "drop", "offset_features"
COMPARING = (DROP, OFFSETS, ALL)
"""Kinds that can compare the analysed model with another one."""
ANALYSES = [
    "clusters",
    "sinks",
    "synthetic",
    "frequency_entropy",
    OFFSETS,
    "matrix_entropy",
    "positional_bias",
]
"""Analyses of one model, in the order of the page; plugins add theirs."""


def kinds() -> tuple[str, ...]:
    """Return all values of ``analysis.kind``: one analysis, ``all``, or ``drop``, which compares
    two models."""
    return (ALL, *ANALYSES, DROP)


Window = Literal["hann", "hamming", "blackman", "rectangular"]


@configuration
class ShortTime:
    """Frames of a short-time Fourier transform, as in the paper on frequency entropy."""

    window: Window = "hann"
    """Window of each frame: hann, hamming, blackman, rectangular."""
    frame: Annotated[Count, Field(ge=2)] = 1024
    """Tokens of a frame; SpectrumFE is left out of shorter texts."""
    hop: Count | None = None
    """Tokens from one frame to the next; null: half a frame."""

    @property
    def step(self) -> int:
        """Tokens from one frame to the next."""
        return self.hop or self.frame // 2

    def problems(self) -> list[Problem]:
        """Return a hop that is longer than a frame as a problem, with its key relative to the
        frames'."""
        if self.hop is None or self.hop <= self.frame:
            return []
        return [Problem("hop", f"expected 1 to {self.frame} tokens, a frame, got {self.hop}.")]


USUAL = ShortTime()


class Gate(NamedTuple):
    """Selects the pairs whose entropy ``measure`` is ``side`` the threshold ``tau``."""

    measure: str
    side: Literal["below", "above"]
    tau: float


GATE = re.compile(r"(spectrum|sequence)\s*([<>])\s*(0?\.\d+|[01](?:\.\d*)?)")


def rules(gate: str) -> tuple[Gate, ...]:
    """Parse a gate such as ``spectrum>0.4+sequence<0.6``, which selects the pairs of all its rules.

    Raises:
        ValueError: the gate is malformed.
    """
    parsed: list[Gate] = []
    for part in gate.split("+"):
        if not (match := GATE.fullmatch(part.strip())):
            raise ValueError(gate)
        measure, sign, tau = match.groups()
        parsed.append(Gate(measure, "below" if sign == "<" else "above", float(tau)))
    return tuple(parsed)


@configuration
class AttenuationSettings:
    """Perplexity by the factor on pairs of extreme entropy (Frequency Entropy, Fig. 4)."""

    alphas: list[Share] = field(default_factory=lambda: [0.0, 0.5, 0.9])
    """Factors; []: leave it out."""
    gates: list[str] = field(
        default_factory=lambda: ["spectrum<0.2", "spectrum>0.4", "sequence<0.6"]
    )
    """Which pairs, by entropy and threshold; + joins several rules: spectrum>0.4+sequence<0.6."""
    choice: Literal["page", "validation"] = "page"
    """Text whose entropies choose: page (perplexity is measured on it too), validation."""
    choice_length: Annotated[Count, Field(ge=6)] | None = None
    """Tokens of that text; null: as many as the page has."""
    tokens: list[Count] | None = field(default_factory=lambda: [1024])
    """First tokens of a text whose perplexity is measured, one length after the other; null:
    all."""
    texts: Count = 1
    """Texts to measure, the first of the page."""

    def problems(self) -> list[Problem]:
        """Return the problems that no single field's type can express."""
        problems = []
        for gate in self.gates:
            try:
                rules(gate)
            except ValueError:
                problems.append(
                    Problem(
                        "analysis.attenuation.gates",
                        "expected an entropy and its threshold, as in 'spectrum<0.2' or "
                        f"'spectrum>0.4+sequence<0.6', got {gate!r}.",
                    )
                )
        if self.tokens == []:
            problems.append(
                Problem("analysis.attenuation.tokens", "expected one or more, or null, got none.")
            )
        return problems


@configuration
class NeedleSettings:
    """The needle that heads of extreme matrix entropy are shown with (DoPE, Fig. 2 to 6)."""

    kind: Literal["copy", "question"] = "copy"
    """copy (of the end of the text, needs no words), question (a statement, asked for at the
    end)."""
    depth: Share = 0.1
    """Place of the statement: 0 the beginning of the text, 1 its end."""
    by: Literal["query", "key"] = "query"
    """Whose entropies rank the heads: query, key."""
    ranked_on: Literal["text", "prompt"] = "text"
    """Text that they are ranked in: text (the page's), prompt (the one with the needle)."""
