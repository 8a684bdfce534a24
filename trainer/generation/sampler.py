"""Draws the next token: the likeliest, or one from the distribution or its nucleus."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.generation.sampling import Sampling


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
