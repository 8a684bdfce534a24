"""What decides which token comes next."""

from __future__ import annotations

from dataclasses import dataclass


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
