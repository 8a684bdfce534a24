"""The held-out text on which methods fit their parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from trainer.config import EvaluationConfig
from trainer.data.corpus import held_out_windows
from trainer.data.order import Integers
from trainer.evaluation import many_shot
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.perplexity import token_losses
from trainer.evaluation.results import counted
from trainer.evaluation.task import evenly_spaced
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor s."""
Change = Callable[[Layout], Layout]
"""A change of any layout."""
Notes = list[str]
"""Sentences about what was fitted."""
VALIDATION = "validation"
"""Value of ``evaluation.choice.text`` beside names of tasks."""


@dataclass(frozen=True)
class FitText:
    """Validation text for fits; ``count``: number of windows of each length."""

    held_out: HeldOut
    count: int

    def windows(self, length: int, count: int | None = None) -> Integers:
        """Return ``[N, length]`` tokens, N at most ``count``; those of all lengths end at the same
        places."""
        number = self.count if count is None else min(count, self.count)
        return held_out_windows(self.held_out.split, number, length)

    def choice(self, config: EvaluationConfig, length: int) -> Tensor:
        """Return the ``[texts, tokens]`` on which heads and pairs are chosen (DoPE, Sec. 5.1,
        Tables 3 and 4): windows, or prompts of a task, drawn by another seed than those evaluated.

        Prompts are spread over the trials and depths of the task. A prompt and its answer have
        ``length`` tokens, and all are cut at their beginning to the shortest.
        """
        name = config.choice.text
        texts = config.choice.texts
        if name == VALIDATION:
            return torch.from_numpy(self.windows(length, texts))
        if name in NEEDLE_TASKS:
            needles = replace(config.needles, trials=texts, seed=config.needles.seed + 1)
            task = NEEDLE_TASKS[name](self.held_out.haystack, needles)
        else:
            shots = replace(config.many_shot, trials=texts)
            tasks = many_shot.many_shot_tasks(shots, self.held_out.encoder, many_shot.SEED + 1)
            task = next(task for task in tasks if task.name == name)
        prompts = task.prompts(length)
        rows = [prompts[place].tokens for place in evenly_spaced(len(prompts), texts)]
        bos = len(self.held_out.bos)
        behind = min(map(len, rows)) - bos
        return torch.tensor([[*row[:bos], *row[len(row) - behind :]] for row in rows])

    def changed_by(
        self,
        choose: Callable[[Tensor, Layout], tuple[Change, str]],
        before: LayoutAt,
        training_length: int,
        config: EvaluationConfig,
        notes: Notes,
    ) -> LayoutAt:
        """Return the layouts ``before`` after a change that is chosen at each length, or at
        ``choice.length`` for all.

        ``choose``: returns the change for texts ``[B, T]`` and a layout, and what it has chosen.
        """

        @cache
        def change(factor: float) -> Change:
            ids = self.choice(config, round(factor * training_length))
            change, chosen = choose(ids, before(factor))
            texts = f"{counted(len(ids), 'text')} of {ids.shape[1]:,} tokens"
            notes.append(f"{chosen}, chosen on {texts} ({config.choice.text})")
            return change

        return lambda factor: change(config.choice.length or factor)(before(factor))

    def loss(self, model: LanguageModel, windows: Integers, batch_tokens: int) -> float:
        """Return the mean loss over windows and positions, in nats."""
        first_token = self.held_out.corpus.first_token
        return token_losses(model, windows, first_token, batch_tokens).double().mean().item()
