"""Parameters of sampling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Parameters of token sampling.

    ``temperature`` divides the logits; 0 takes the most likely token. ``top_p`` draws from the
    smallest set of most likely tokens with that total probability (Holtzman et al. 2020). Row r
    draws from a generator seeded with ``seed + r``, so that it does not depend on the other rows.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        """Check the values; return one sentence per problem."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature: expected 0 or a positive number, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p: expected a number above 0 and up to 1, got {self.top_p}.")
        if self.seed < 0:
            found.append(f"seed: expected 0 or a positive number, got {self.seed}.")
        return found
