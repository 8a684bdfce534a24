"""What decides which token comes next."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.errors import Problem


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    ``temperature`` divides the logits; 0 takes the likeliest token. ``top_p`` draws from the
    likeliest tokens only, as few as have that probability together (Holtzman et al. 2020). Row r
    draws from a generator seeded with ``seed + r``, so that other rows make no difference to it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(
                Problem("temperature", f"expected 0 or a positive number, got {self.temperature}.")
            )
        if not 0 < self.top_p <= 1:
            found.append(
                Problem("top_p", f"expected a number above 0 and up to 1, got {self.top_p}.")
            )
        if self.seed < 0:
            found.append(Problem("seed", f"expected 0 or a positive number, got {self.seed}."))
        return found
