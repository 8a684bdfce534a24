"""Measurements during training on one schedule: lengths and benchmarks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L

from trainer.common.ranks import Ranks, all_gather
from trainer.config import MultipleChoiceConfig, RunConfig
from trainer.data.corpus import Corpus
from trainer.data.needles import NeedleVocabulary
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Measurement, Perplexity, Prompted, Reading, Statements
from trainer.evaluation.multiple_choice import (
    SUFFIX,
    Question,
    benchmark_directory,
    read_questions,
    score_questions,
)
from trainer.evaluation.results import Milestone, Reach
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.lightning.callbacks import Metrics, StepCallback
from trainer.lightning.module import LanguageModule, evaluating
from trainer.lightning.phases import PhaseChange
from trainer.lightning.strategy import gathered
from trainer.runs.metrics_file import RETRIEVAL, TEXT_LOSS
from trainer.runs.phases import phase_before

log = logging.getLogger(__name__)

TRIALS, WINDOWS = 64, 16
"""Retrieval trials and windows of held-out text of a length."""


class Monitors(StepCallback):
    """Takes each measure when it is due, and all measures around changes of the model.

    These moments are: before the first step, for benchmarks of trained weights; directly after a
    change; after the last step of every phase. The results of lengths and benchmarks are saved.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        change: PhaseChange,
        metrics: Metrics,
    ) -> None:
        self.change, self.metrics = change, metrics
        self.phase_ends = {phase.end for phase in change.phases}
        self.reaches: list[dict[str, Any]] = []
        self.milestones: list[dict[str, Any]] = []
        self.measures: list[Measure] = []
        self.first_measure: Measure | None = None
        if config.monitor.lengths_every is not None:
            self.measures.append(Lengths(config, corpus, ranks, self.reaches))
        if config.monitor.benchmarks.every is not None:
            benchmarks = Benchmarks(config, corpus, ranks, change, self.milestones)
            self.measures.append(benchmarks)
            self.first_measure = benchmarks if config.model.is_trained else None

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far, as :class:`Reach` and :class:`Milestone` hold them."""
        return {"lengths": [*self.reaches], "benchmarks": [*self.milestones]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the measurements so far."""
        self.reaches[:], self.milestones[:] = state_dict["lengths"], state_dict["benchmarks"]

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Measure trained weights before the first step."""
        if trainer.global_step == 0 and self.first_measure is not None and not self.milestones:
            self._take([self.first_measure], module, 0)

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure directly after the model was changed."""
        if self.change.changed_at(trainer.global_step):
            self._take(self.measures, module, trainer.global_step)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Take the measures that are due after a step."""
        step = trainer.global_step
        is_end = step in self.phase_ends
        self._take([m for m in self.measures if is_end or m.is_due(step)], module, step)

    def _take(self, measures: Iterable[Measure], module: LanguageModule, step: int) -> None:
        for measure in measures:
            with self.metrics.elsewhere():
                self.metrics.add(measure.measure(module, step, self.change.has_dropped))


class Lengths:
    """Retrieval and held-out loss at several lengths, on the same validation text every time.

    Lengths count from the training length of the whole run in all its phases, as in its report.
    Ranks share windows and trials.
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, ranks: Ranks, results: list[dict[str, Any]]
    ) -> None:
        monitor, needles, C = config.monitor, config.evaluation.needles, config.training_length
        assert monitor.lengths_every is not None
        self.every, self.results, self.C = monitor.lengths_every, results, C
        self.batch_tokens = config.evaluation.batch_tokens
        self.lengths = [C * factor for factor in sorted(set(monitor.lengths))]
        text, first = corpus.validation, corpus.first_token
        windows = windows_with_common_ends(text, WINDOWS, self.lengths)
        whole = Perplexity(windows, first, C, last=C)
        self.perplexity = whole.part(ranks.rank, ranks.world_size)
        self.statements: Measurement | None = None
        if config.data.needles.share:
            vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)
            counts = needles.needles, needles.seed, needles.changes
            asked = Statements.make(text, self.lengths, vocabulary, first, TRIALS, *counts)
            self.statements = asked.part(ranks.rank, ranks.world_size)

    def is_due(self, step: int) -> bool:
        """Whether to measure after ``step`` steps."""
        return step % self.every == 0

    def measure(self, module: LanguageModule, step: int, has_dropped: bool) -> dict[str, float]:
        """Read this rank's part; afterwards all ranks have the same values."""
        loss: list[Any] = []
        retrieval = []
        with evaluating(module) as model, gathered(module.model):
            for length in self.lengths:
                reading = Reading(model, length, None, self.batch_tokens)
                parts = all_gather(self.perplexity.read(reading))
                mean = _mean(self.perplexity.cell(length, parts)["losses"])
                loss.append(mean if math.isfinite(mean) else None)
                if self.statements is not None:
                    scores = all_gather(self.statements.read(reading)["scores"])
                    retrieval.append(_mean([x for of_rank in scores for x in of_rank]))
        reach = Reach(
            step,
            has_dropped,
            self.C,
            tuple(self.lengths),
            tuple(loss),
            tuple(retrieval),
        )
        self.results.append(asdict(reach))
        return {
            f"{name}{n // self.C}x": value
            for name, values in ((TEXT_LOSS, loss), (RETRIEVAL, retrieval))
            for n, value in zip(self.lengths, values, strict=False)
        }


class Benchmarks:
    """Scores of tasks as in DroPE's Fig. 10, on the same questions every time.

    Ranks share the questions.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        change: PhaseChange,
        results: list[dict[str, Any]],
    ) -> None:
        self.change, self.results, self.settings = change, results, config.monitor.benchmarks
        self.C, self.batch_tokens = config.training_length, config.evaluation.batch_tokens
        asked, share = self.settings, slice(ranks.rank, None, ranks.world_size)
        self.lengths = [round(self.C * factor) for factor in sorted(set(asked.lengths))]
        self.tasks: list[Measurement] = []
        if asked.tasks:
            text = HeldOut(corpus, corpus.validation, corpus.first_token, config.data.needles.share)
            evaluation = config.evaluation.limited(asked.limit, asked.limit)
            evaluation = replace(evaluation, tasks=asked.tasks, windows=asked.limit, last=None)
            tasks, _ = make_tasks(text, evaluation, self.lengths, self.C)
            tasks = [replace(t, limit=asked.limit) if isinstance(t, Prompted) else t for t in tasks]
            check_prompts(tasks, self.lengths)
            self.tasks = [task.part(ranks.rank, ranks.world_size) for task in tasks]
        eos = (corpus.end_of_text,)
        self.encoder = Encoder(corpus.tokenizer, self.C, add_bos=True, eos=eos)
        choice = MultipleChoiceConfig(asked.multiple_choice)
        self.questions: dict[str, list[Question]] = {}
        for task in asked.multiple_choice:
            path = benchmark_directory(choice) / f"{task}{SUFFIX}"
            self.questions[task] = read_questions(path, asked.limit)[share]

    def is_due(self, step: int) -> bool:
        """Whether to measure after ``step`` steps."""
        assert self.settings.every is not None
        return step % self.settings.every == 0

    def _tokens(self, step: int) -> int:
        return phase_before(self.change.phases, step).tokens_at(step)

    def measure(self, module: LanguageModule, step: int, has_dropped: bool) -> dict[str, float]:
        """Answer this rank's part of the questions; afterwards all ranks have the same scores."""
        began = time.perf_counter()
        scores: dict[str, float] = {}
        with evaluating(module) as model, gathered(module.model):
            for task in self.tasks:
                for length in self.lengths:
                    reading = Reading(model, length, None, self.batch_tokens)
                    cell = task.measure(reading) if task.sequences(length) else {}
                    losses = _gathered(cell.get("losses", ()))
                    hits = _mean(_gathered(cell.get("scores", ())))
                    name = f"{task.key}/{length / self.C:g}x"
                    scores[name] = math.exp(_mean(losses)) if losses else hits
            for name, questions in self.questions.items():
                tokens = MultipleChoiceConfig.batch_tokens
                answers = (
                    score_questions(model, self.encoder, name, questions, tokens, silent=True)
                    if questions
                    else ()
                )
                each = {score.metric: score.each for score in answers}
                for metric in ("acc", "acc_norm"):
                    scores[f"{name}/{metric}"] = _mean(_gathered(each.get(metric, ())))
        self.results.append(asdict(Milestone(step, self._tokens(step), has_dropped, dict(scores))))
        log.info("Step %d: benchmarks took %.1f s", step, time.perf_counter() - began)
        return {f"benchmark/{key}": x for key, x in scores.items() if math.isfinite(x)}


Measure = Lengths | Benchmarks
"""A measurement of the model in training. All ranks call ``measure`` together."""


def _gathered(values: Sequence[float]) -> list[float]:
    """Gather the values of all ranks."""
    return [value for of_rank in all_gather(list(values)) for value in of_rank]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
