"""Needle retrieval: is the number that was stated for a name the most likely next token?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.data.needles import Trials
from trainer.evaluation.passes import sequences_at_once
from trainer.model.language_model import LanguageModel


@torch.no_grad()
def successes(
    model: LanguageModel,
    trials: Trials,
    batch_tokens: int,
    done: Callable[[int], None] = lambda trials: None,
) -> list[bool]:
    """Whether each trial's answer is the most likely next token.

    Only the last position goes through the head, and a batch holds at most ``batch_tokens`` tokens
    (at least one trial), so memory is linear in the length. ``done`` is told how many trials were
    read.
    """
    device = model.device
    prompts = torch.from_numpy(trials.prompts)
    answers = torch.from_numpy(trials.answers)
    size = sequences_at_once(model, prompts.shape[1], batch_tokens)
    found = []
    for part in prompts.split(size):
        found.append(model(part.to(device), last=1)[:, -1].argmax(dim=-1).cpu())
        done(len(part))
    return (torch.cat(found) == answers).tolist()
