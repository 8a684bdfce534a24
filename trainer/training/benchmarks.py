"""Benchmarks of the model in training: scores of tasks as in DroPE's Fig. 10.

They are taken before the first step of trained weights, every so many steps, directly after a
change of the model, and after the last step of every phase, on the same questions every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainer.common.ranks import all_gather, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.task import Task
from trainer.evaluation.tasks import make_tasks
from trainer.lightning.module import evaluating
from trainer.lightning.strategy import whole_model
from trainer.model.decoder import Decoder


def benchmark_tasks(config: RunConfig, corpus: Corpus) -> list[Task]:
    """Return the tasks of a run, each at every length."""
    asked, C = config.benchmarks, config.training_length
    if asked.every is None:
        return []
    lengths = sorted({round(C * factor) for factor in asked.lengths})
    text = HeldOut(corpus, corpus.validation, (corpus.first_token,), config.data.needles.share)
    evaluation = replace(
        config.evaluation, tasks=asked.tasks, windows=asked.limit, limit=asked.limit
    )
    return make_tasks(text, evaluation, lengths, C)[0]


def benchmark_scores(model: Decoder, tasks: Sequence[Task], config: RunConfig) -> dict[str, float]:
    """Return scores by task and length in training lengths; NaN without questions.

    Ranks share the questions; all call this together and get the same scores.
    """
    ranks = current_ranks()
    tokens = config.evaluation.batch_tokens // ranks.world_size
    share = slice(ranks.rank, None, ranks.world_size)
    scores: dict[str, float] = {}
    with evaluating(model):
        model = whole_model(model)
        for task in tasks:
            batches = task.batches(model, tokens)[share]
            read = [value for batch in batches for value in batch()]
            for key in task.titles:
                mine = [value for _, name, value in read if name == key]
                values = [value for of_rank in all_gather(mine) for value in of_rank]
                mean = sum(values) / len(values) if values else math.nan
                score = math.exp(mean) if task.metric == "loss" else mean
                scores[f"{key}/{task.length / config.training_length:g}x"] = score
    return scores
