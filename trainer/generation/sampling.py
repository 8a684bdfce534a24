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
