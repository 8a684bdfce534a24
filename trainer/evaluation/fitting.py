"""The held-out text on which methods fit their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.config import EvaluationConfig
from trainer.data.corpus import divided, parts_of_windows, windows_with_fixed_ends
from trainer.data.order import Integers
from trainer.evaluation import many_shot
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.perplexity import token_losses
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor s."""
Notes = list[str]
"""Sentences about what was fitted."""
VALIDATION = "validation"
"""Value of ``evaluation.choice.text`` beside names of tasks."""


def choice_names() -> list[str]:
    """Return the values of ``evaluation.choice.text``: tasks whose prompts are drawn by a seed."""
    return [VALIDATION, *NEEDLE_TASKS, *many_shot.TASKS]


@dataclass(frozen=True)
class FitText:
    """Validation text for fits; ``count``: number of windows of each length."""

    held_out: HeldOut
    count: int

    def windows(self, length: int) -> Integers:
        """Return ``[N, length]`` tokens; the windows of all lengths end at the same places."""
        return windows_with_fixed_ends(self.held_out.split, self.count, length)

    def spread(self, count: int, length: int) -> Integers:
        """Return ``[count, length]`` windows, or all if there are fewer, spread evenly over each
        text of a mixture, in the texts' shares of all windows."""
        text_of = parts_of_windows(self.held_out.split, self.count, length)
        texts, sizes = (x.tolist() for x in np.unique(text_of, return_counts=True))
        shares = divided(min(count, len(text_of)), sizes, sizes)
        rows = []
        for text, size, share in zip(texts, sizes, shares, strict=True):
            rows.append(np.flatnonzero(text_of == text)[_spread_evenly(share, size)])
        return self.windows(length)[np.sort(np.concatenate(rows))]

    def choice(self, config: EvaluationConfig, length: int) -> Tensor:
        """Return the ``[texts, tokens]`` on which heads and pairs are chosen (DoPE, Sec. 5.1,
        Tables 3 and 4): windows, or prompts of a task, none of which is evaluated.

        Prompts are spread over the trials and depths of the task. A prompt and its answer have
        ``length`` tokens, and all are cut at their beginning to the shortest.
        """
        name, texts = config.choice.text, config.choice.texts
        if name == VALIDATION:
            return torch.from_numpy(self.spread(texts, length))
        haystack = self.held_out.haystack
        if name in NEEDLE_TASKS:
            needles = replace(config.needles, trials=texts, seed=config.needles.seed + 1)
            task = NEEDLE_TASKS[name](haystack, needles)
        else:
            shots = replace(config.many_shot, trials=texts)
            tasks = many_shot.many_shot_tasks(shots, haystack.encoder, many_shot.SEED + 1)
            task = next(task for task in tasks if task.name == name)
        prompts = task.prompts(length)
        rows = [prompts[i].tokens for i in _spread_evenly(min(texts, len(prompts)), len(prompts))]
        bos = len(haystack.encoder.bos)
        behind = min(map(len, rows)) - bos
        return torch.tensor([[*row[:bos], *row[len(row) - behind :]] for row in rows])

    def loss(self, model: LanguageModel, windows: Integers, batch_tokens: int) -> float:
        """Return the mean loss over windows and positions, in nats."""
        first_token = self.held_out.corpus.first_token
        return token_losses(model, windows, first_token, batch_tokens).double().mean().item()


def _spread_evenly(count: int, total: int) -> Integers:
    return np.linspace(0, total - 1, count).round().astype(np.int64)
