"""Which token comes next: the likeliest, or one drawn from the distribution or its nucleus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature: expected 0 or a positive number, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p: expected a number above 0 and up to 1, got {self.top_p}.")
        if self.seed < 0:
            found.append(f"seed: expected 0 or a positive number, got {self.seed}.")
        return found


class Sampler:
    """Draws tokens for ``rows`` sequences."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(sampling.seed + r) for r in range(rows)]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """One token id each, ``[B]``, from logits ``[B, vocab]`` of the sequences ``rows``."""
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1)
        draws = [torch.rand((1,), generator=self.generators[row]) for row in rows]
        # In float64 the sums of a large vocabulary end above every draw.
        p = (logits.double() / self.sampling.temperature).softmax(dim=-1)
        order = None
        if self.sampling.top_p < 1:
            p, order = p.sort(dim=-1, descending=True, stable=True)
            p = p.masked_fill(p.cumsum(dim=-1) - p >= self.sampling.top_p, 0)
        sums = p.cumsum(dim=-1)
        at = torch.searchsorted(sums, torch.stack(draws).to(sums) * sums[:, -1:], right=True)
        return (at if order is None else order.gather(-1, at))[:, 0]
