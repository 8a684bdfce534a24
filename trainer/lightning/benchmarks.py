"""Benchmarks of the model in training."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

from trainer.common.ranks import Ranks, all_gather
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.results import is_known
from trainer.evaluation.task import PromptTask, Reading
from trainer.evaluation.tasks import make_tasks
from trainer.lightning.module import evaluating
from trainer.lightning.strategy import gathered
from trainer.model.decoder import Decoder


class Benchmarks:
    """Scores of tasks as in DroPE's Fig. 10, on the same questions every time.

    They are taken before the first step of trained weights, every so many steps, directly after a
    change of the model, and after the last step of every phase. Ranks share the questions.

    ``milestones``: the measurements so far; see ``trainer.evaluation.results.RunSummary``.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
        asked = config.benchmarks
        self.milestones: list[dict[str, Any]] = []
        self.C = config.training_length
        if asked.every is None:
            return
        self.share = slice(ranks.rank, None, ranks.world_size)
        self.batch_tokens = config.evaluation.batch_tokens // ranks.world_size
        self.lengths = [round(self.C * factor) for factor in sorted(set(asked.lengths))]
        text = HeldOut(corpus, corpus.validation, corpus.first_token, config.data.needles.share)
        evaluation = config.evaluation.limited(asked.limit)
        evaluation = replace(evaluation, tasks=asked.tasks, windows=asked.limit, last=None)
        tasks, _ = make_tasks(text, evaluation, self.lengths, self.C)
        self.tasks = [
            replace(task, limit=asked.limit) if isinstance(task, PromptTask) else task
            for task in tasks
        ]
        for task, length in product(self.tasks, self.lengths):
            task.fingerprint(length)  # makes the prompts: all must fit

    def measure(self, model: Decoder, step: int, tokens: int, dropped: bool) -> dict[str, float]:
        """Add a milestone, the same on all ranks; return its known scores under names of metrics.

        ``step``, ``tokens``: of the model. ``dropped``: whether its encoding was dropped by then.
        """
        scores: dict[str, float] = {}
        with evaluating(model), gathered(model):
            for task, length in product(self.tasks, self.lengths):
                read = task.read(Reading(model, length, self.batch_tokens, part=self.share))
                for key in task.titles:
                    mine = [value for _, name, value in read if name == key]
                    values = [value for of_rank in all_gather(mine) for value in of_rank]
                    mean = sum(values) / len(values) if values else math.nan
                    score = math.exp(mean) if task.metric == "loss" else mean
                    scores[f"{key}/{length / self.C:g}x"] = score
        self.milestones.append(
            {"step": step, "tokens": tokens, "dropped": dropped, "scores": scores}
        )
        return {f"benchmark/{key}": x for key, x in scores.items() if is_known(x)}
