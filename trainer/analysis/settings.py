"""Settings of single analyses; imports no torch, so that a mistake in a configuration is reported
at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainer.common.errors import Problem

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


@dataclass(frozen=True)
class AttenuationSettings:
    """Perplexity by the factor on pairs of extreme frequency entropy (Frequency Entropy, Fig. 4).

    ``alphas``: the factors; empty: it is left out. ``gates``: which pairs, see :func:`rules`.
    ``choice``: the text whose entropies decide, the ``page``'s own, on which perplexity is measured
    too, or ``validation`` text apart from it. ``choice_length``: tokens of it (null: as many as the
    page has). ``tokens``: the first ones of a text whose perplexity is measured, at several lengths
    one after the other (null: all). ``texts``: how many, the first of the page's.
    """

    alphas: list[float] = field(default_factory=lambda: [0.0, 0.5, 0.9])
    gates: list[str] = field(
        default_factory=lambda: ["spectrum<0.2", "spectrum>0.4", "sequence<0.6"]
    )
    choice: Literal["page", "validation"] = "page"
    choice_length: int | None = None
    tokens: list[int] | None = field(default_factory=lambda: [1024])
    texts: int = 1

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if not all(0 <= alpha <= 1 for alpha in self.alphas):
            found.append(
                Problem(
                    "analysis.attenuation.alphas",
                    f"expected numbers from 0 to 1, got {list(self.alphas)}.",
                )
            )
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
        if self.choice_length is not None and self.choice_length < 6:
            found.append(
                Problem(
                    "analysis.attenuation.choice_length",
                    f"expected 6 tokens or more, got {self.choice_length}.",
                )
            )
        if self.tokens is not None and (not self.tokens or min(self.tokens) < 1):
            found.append(
                Problem(
                    "analysis.attenuation.tokens",
                    f"expected numbers of tokens, or null for all, got {self.tokens}.",
                )
            )
        if self.texts < 1:
            found.append(
                Problem("analysis.attenuation.texts", f"expected 1 or more, got {self.texts}.")
            )
        return found


@dataclass(frozen=True)
class NeedleSettings:
    """The needle that heads of extreme matrix entropy are shown with (DoPE, Fig. 2 to 6).

    ``kind``: a ``copy`` of the end of the text at a tenth of it, for which no words are needed; or
    a statement and, at the end of the text, the ``question`` for it. ``depth``: of the statement,
    0 for the beginning and 1 for the end. ``by``: whose entropies rank the heads, those of queries
    or of the keys that they read; ``ranked_on``: in the page's ``text``, or in the ``prompt`` that
    has the needle.
    """

    kind: Literal["copy", "question"] = "copy"
    depth: float = 0.1
    by: Literal["query", "key"] = "query"
    ranked_on: Literal["text", "prompt"] = "text"

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        if 0 <= self.depth <= 1:
            return []
        return [
            Problem(
                "analysis.needle.depth",
                f"expected a number from 0 (beginning) to 1 (end), got {self.depth}.",
            )
        ]
