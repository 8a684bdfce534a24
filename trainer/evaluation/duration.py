"""How long an evaluation will take."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from trainer.evaluation.passes import sequences_at_once
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel

log = logging.getLogger(__name__)

SECONDS_TO_ESTIMATE = 4.0


@torch.no_grad()
def say_duration(
    model: LanguageModel, lengths: Collection[int], total: float, batch_tokens: int
) -> None:
    """Say how long ``total`` operations will take, from the time of a forward pass at the longest
    of ``lengths`` at which that is a few seconds."""
    device = model.device
    seconds = per_operation = 0.0
    for length in sorted(lengths):
        rows = min(sequences_at_once(model, length, batch_tokens), 32)
        work = rows * forward_flops(model.config, model.layout, length)
        if work * per_operation > SECONDS_TO_ESTIMATE:
            break
        ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        if not seconds:
            model(ids, last=1)  # the first pass is slower
        began = time.perf_counter()
        model(ids, last=1)[0, 0, 0].item()
        seconds = time.perf_counter() - began
        per_operation = seconds / work
    log.info("About %s in all", _duration(total * per_operation))


def _duration(seconds: float) -> str:
    """In seconds, or in minutes where these say enough."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
