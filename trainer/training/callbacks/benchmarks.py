"""Benchmarks during training, as in DroPE's Fig. 10."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import lightning as L
import numpy as np

from trainer.common.errors import Problem, renaming
from trainer.data.corpus import Corpus
from trainer.evaluation.benchmarks import HarnessConfig, MultipleChoiceConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.measurements import Measurement, Prompted
from trainer.evaluation.multiple_choice import (
    SUFFIX,
    Question,
    benchmark_directory,
    missing_tasks,
    read_questions,
    score_questions,
)
from trainer.evaluation.results import Milestone
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.model.language_model import LanguageModel
from trainer.runs.config import RunConfig
from trainer.runs.phases import phase_before
from trainer.runs.ranks import Ranks, all_gather
from trainer.runs.training_config import BenchmarksConfig
from trainer.training.callbacks.guards import watch
from trainer.training.module import LanguageModule, evaluating
from trainer.training.strategy import gathered

log = logging.getLogger(__name__)


class Benchmarks:
    """Scores of tasks, on the same questions every time, divided among the ranks."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, ranks: Ranks, remember: Callable[[Milestone], None]
    ) -> None:
        self.config, self.ranks, self.remember = config, ranks, remember
        self.settings = config.monitor.benchmarks
        self.tasks, self.lengths = _tasks(config, corpus, ranks)
        self.encoder = Encoder(corpus.tokenizer, config.data.sequence_length, add_bos=True)
        self.questions = _questions(self.settings, ranks)

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether the step crossed a multiple of the configured steps or tokens."""
        before = phase_before(module.phases, step - 1).tokens_at(step - 1)
        return self.settings.is_due(before, _tokens(module, step), step)

    def measure(
        self, trainer: L.Trainer, module: LanguageModule, has_dropped: bool
    ) -> dict[str, float]:
        """Answer this rank's part of the questions; afterwards all ranks have the same scores."""
        began, step = time.perf_counter(), trainer.global_step
        scores: dict[str, float] = {}
        with evaluating(module) as model, gathered(module.model):
            for work in (self._of_lengths, self._of_questions, self._of_harness):
                scores |= work(model)
        self.remember(Milestone(step, _tokens(module, step), has_dropped, dict(scores)))
        log.info("Step %d: benchmarks took %.1f s", step, time.perf_counter() - began)
        return {f"benchmark/{key}": x for key, x in scores.items() if math.isfinite(x)}

    def _of_lengths(self, model: LanguageModel) -> dict[str, float]:
        found = {}
        C, batch_tokens = self.config.data.sequence_length, self.config.evaluation.batch_tokens
        for task in self.tasks:
            for length in self.lengths:
                self._watch()
                has = task.sequences(length)
                cell = task.measure(model, length, None, batch_tokens) if has else {}
                losses = _gathered(cell.get("by_window", ()))
                scores = _gathered(cell.get("scores", ()))
                value = float(np.exp(_mean(losses))) if losses else _mean(scores)
                found[f"{task.key}/{length / C:g}x"] = value
        return found

    def _of_questions(self, model: LanguageModel) -> dict[str, float]:
        found = {}
        for task, own in self.questions.items():
            self._watch()
            tokens = MultipleChoiceConfig.batch_tokens
            scores = (
                score_questions(model, self.encoder, task, own, tokens, silent=True) if own else []
            )
            each = {score.metric: score.each for score in scores}
            for metric in ("acc", "acc_norm"):
                found[f"{task}/{metric}"] = _mean(_gathered(each.get(metric, ())))
        return found

    def _of_harness(self, model: LanguageModel) -> dict[str, float]:
        if not self.settings.harness:
            return {}
        from trainer.evaluation import harness

        self._watch()
        config = _harness_config(self.settings)
        found = harness.score_tasks(model, self.encoder, config, self._spread, silent=True)
        return {f"harness/{score.task}/{score.metric}": score.value for score in found}

    def _spread(
        self, items: Sequence[Any], compute: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Compute a part on every rank; return the results of all, in order."""
        rank, ranks = self.ranks.rank, self.ranks.world_size
        parts = all_gather(compute(items[rank::ranks]))
        found: list[Any] = [None] * len(items)
        for start, part in enumerate(parts):
            found[start::ranks] = part
        return found

    def _watch(self) -> None:
        """Extend the watchdog: a task may take as long as a first step."""
        watch(self.config.trainer.step_timeout, 10)


KEY = "monitor.benchmarks"


def benchmark_problems(config: RunConfig) -> list[Problem]:
    """What a run's benchmarks lack on this machine, one sentence each."""
    asked = config.monitor.benchmarks
    keys = {"evaluation.tasks": f"{KEY}.multiple_choice", "evaluation": KEY}
    found = missing_tasks(_choice_config(asked)) if asked.multiple_choice else []
    found = [problem.renamed(keys) for problem in found]
    if asked.harness and find_spec("lm_eval") is None:
        found.append(Problem(KEY, "lm-eval is not installed; pip install 'unrope[eval]'."))
    elif asked.harness:
        from trainer.evaluation.harness import task_problems

        keys = {"evaluation.tasks": f"{KEY}.harness", "evaluation": KEY}
        found += [problem.renamed(keys) for problem in task_problems(_harness_config(asked))]
    return found


def _tasks(
    config: RunConfig, corpus: Corpus, ranks: Ranks
) -> tuple[list[Measurement], tuple[int, ...]]:
    """Return this rank's part of the tasks with lengths, and their lengths.

    Raises:
        UserError: there is too little validation text, or a task does not fit a length.
    """
    asked, C = config.monitor.benchmarks, config.data.sequence_length
    lengths = [round(C * factor) for factor in sorted(set(asked.lengths))]
    if not asked.tasks:
        return [], ()
    text = HeldOut(corpus, corpus.validation, corpus.end_of_text, config.data.needles.share)
    with renaming(evaluation=KEY):
        made, notes = make_tasks(text, _within(config.evaluation, asked), lengths, C)
        made = [replace(t, limit=asked.limit) if isinstance(t, Prompted) else t for t in made]
        check_prompts(made, lengths)
    for note in notes:
        log.warning("monitor.benchmarks.tasks: %s", note)
    return [task.part(ranks.rank, ranks.world_size) for task in made], tuple(lengths)


def _within(config: EvaluationConfig, asked: BenchmarksConfig) -> EvaluationConfig:
    """Return the evaluation's settings, limited to the questions asked."""
    limit = asked.limit
    return replace(
        config,
        tasks=asked.tasks,
        windows=limit,
        last=None,
        needles=replace(config.needles, trials=min(config.needles.trials, limit)),
        ruler=replace(config.ruler, trials=min(config.ruler.trials, limit)),
        longbench=replace(config.longbench, limit=min(config.longbench.limit or limit, limit)),
        many_shot=replace(config.many_shot, trials=min(config.many_shot.trials, limit)),
    )


def _choice_config(asked: BenchmarksConfig) -> MultipleChoiceConfig:
    return MultipleChoiceConfig(asked.multiple_choice, directory=asked.directory)


def _harness_config(asked: BenchmarksConfig) -> HarnessConfig:
    return HarnessConfig(asked.harness, limit=asked.limit, include_path=asked.include_path)


def _questions(asked: BenchmarksConfig, ranks: Ranks) -> dict[str, list[Question]]:
    """Return this rank's part of every task's questions; tasks without questions are omitted."""
    directory = benchmark_directory(_choice_config(asked))
    found = {}
    for task in asked.multiple_choice:
        questions = read_questions(directory / f"{task}{SUFFIX}", asked.limit)
        own = questions[ranks.rank :: ranks.world_size]
        found[task] = [replace(question, unconditional=()) for question in own]
    return found


def _tokens(module: LanguageModule, step: int) -> int:
    return phase_before(module.phases, step).tokens_at(step)


def _gathered(values: Sequence[float]) -> list[float]:
    """Gather the values of all ranks."""
    return [value for of_rank in all_gather(list(values)) for value in of_rank]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
