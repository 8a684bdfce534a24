"""Settings of single analyses; imports no torch, so that a mistake in a configuration is reported
at once."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from trainer.common.errors import Problem
from trainer.common.fields import Count, Share, configuration

Rule = tuple[str, Literal["below", "above"], float]
"""Which entropy, on which side of which threshold."""
GATE = re.compile(r"(spectrum|sequence)\s*([<>])\s*(0?\.\d+|[01](?:\.\d*)?)")


def rules(gate: str) -> tuple[Rule, ...]:
    """Those of a gate such as ``spectrum>0.4+sequence<0.6``, whose pairs are all that any of them
    names.

    Raises:
        ValueError: it is none.
    """
    found: list[Rule] = []
    for part in gate.split("+"):
        if not (known := GATE.fullmatch(part.strip())):
            raise ValueError(gate)
        measure, sign, tau = known.groups()
        found.append((measure, "below" if sign == "<" else "above", float(tau)))
    return tuple(found)


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
        """What is impossible, one sentence each."""
        found = []
        for gate in self.gates:
            try:
                rules(gate)
            except ValueError:
                found.append(
                    Problem(
                        "analysis.attenuation.gates",
                        "expected an entropy and its threshold, as in 'spectrum<0.2' or "
                        f"'spectrum>0.4+sequence<0.6', got {gate!r}.",
                    )
                )
        if self.tokens == []:
            found.append(
                Problem("analysis.attenuation.tokens", "expected one or more, or null, got none.")
            )
        return found


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
