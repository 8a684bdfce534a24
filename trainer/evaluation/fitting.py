"""The held-out text on which methods fit their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.config import EvaluationConfig
from trainer.data.corpus import divided, held_out_windows, parts_of_windows
from trainer.data.order import Integers
from trainer.evaluation.held_out import HeldOut, token_losses
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor s."""
Notes = list[str]
"""Sentences about what was fitted."""


def spread_evenly(count: int, total: int) -> Integers:
    """Return the indices of ``count`` of ``total`` rows, spread evenly, or of all if there are
    fewer."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(np.int64)


@dataclass(frozen=True)
class FitText:
    """Validation text for fits, which is not part of the reported text.

    ``count``: number of windows of each length. ``longest``: tokens of the longest windows that
    any fit reads.
    """

    held_out: HeldOut
    count: int
    longest: int

    def windows(self, length: int) -> Integers:
        """Return ``[N, length]`` tokens; the windows of all lengths end at the same places."""
        windows = held_out_windows(self.held_out.split, self.count, self.longest)
        return windows[:, self.longest - length :]

    def spread(self, count: int, length: int) -> Integers:
        """Return ``[count, length]`` windows, or all if there are fewer.

        They are spread evenly over each text of a mixture, in the texts' shares of all windows.

        Windows of one text overlap with their neighbours, so that the first ones are nearly one
        text.
        """
        windows = self.windows(length)
        text_of = parts_of_windows(self.held_out.split, self.count, self.longest)
        rows_of = [np.flatnonzero(text_of == text) for text in np.unique(text_of)]
        sizes = [len(rows) for rows in rows_of]
        shares = divided(min(count, len(windows)), sizes, sizes)
        chosen = [
            rows[spread_evenly(share, len(rows))]
            for rows, share in zip(rows_of, shares, strict=True)
        ]
        return windows[np.sort(np.concatenate(chosen))]

    def choice(self, config: EvaluationConfig, length: int) -> Tensor:
        """Return the ``[texts, tokens]`` on which heads and pairs are chosen (DoPE, Sec. 5.1,
        Tables 3 and 4)."""
        if config.choice.text == "validation":
            return torch.from_numpy(self.spread(config.choice.texts, length))
        return torch.from_numpy(choice_prompts(config, self.held_out.haystack, length))

    def loss(self, model: LanguageModel, windows: Integers, batch_tokens: int) -> float:
        """Return the mean loss over windows and positions, in nats."""
        first_token = self.held_out.corpus.first_token
        return token_losses(model, windows, first_token, batch_tokens).double().mean().item()

    @property
    def key(self) -> str:
        """Hash of the text and its windows."""
        text = self.held_out
        return fingerprint(text.corpus.fingerprint, text.bos, self.count, self.longest)


def choice_prompts(config: EvaluationConfig, haystack: Haystack, length: int) -> Integers:
    """Return ``[texts, tokens]`` of prompts on which methods choose, none of which is evaluated.

    The prompts are spread over the trials and depths of a task. A prompt leaves room for its
    answer, and all are cut at their beginning to the shortest: many-shot prompts differ by less
    than an example. ``haystack``: of validation text. ``length``: tokens of a prompt and its
    answer.
    """
    name, texts = config.choice.text, config.choice.texts
    if name in NEEDLE_TASKS:
        needles = replace(config.needles, trials=texts, seed=config.needles.seed + 1)
        prompts = NEEDLE_TASKS[name](haystack, needles).prompts(length)
    else:
        shots = replace(config.many_shot, trials=texts)
        tasks = many_shot_tasks(shots, haystack.encoder, seed=SEED + 1)
        prompts = next(task for task in tasks if task.name == name).prompts(length)
    tokens = [prompts[i].tokens for i in spread_evenly(texts, len(prompts))]
    bos = len(haystack.encoder.bos)
    behind = min(map(len, tokens)) - bos
    return np.array([[*row[:bos], *row[len(row) - behind :]] for row in tokens], dtype=np.int64)
