"""Measurements during training on one schedule: lengths, attention statistics, benchmarks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any, Protocol, TypeVar

import lightning as L
import numpy as np
import torch

from trainer.analysis.attention import MEASURES, probe
from trainer.common.errors import Problem, UserError, renaming
from trainer.config import BenchmarksConfig, HarnessConfig, MultipleChoiceConfig, RunConfig
from trainer.data.corpus import Corpus
from trainer.data.held_out import held_out_windows
from trainer.data.needles import NeedleVocabulary, Trials
from trainer.data.order import Integers
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Measurement, Perplexity, Prompted, Reading, Statements
from trainer.evaluation.multiple_choice import (
    SUFFIX,
    Question,
    benchmark_directory,
    missing_tasks,
    read_questions,
    score_questions,
)
from trainer.evaluation.results import Milestone, Reach
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.model.language_model import LanguageModel
from trainer.runs.metrics_file import RETRIEVAL, TEXT_LOSS
from trainer.runs.phases import phase_before
from trainer.runs.ranks import Ranks, all_gather
from trainer.runs.saved_state import RunState
from trainer.training.callbacks.guards import watch
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule, StepCallback, evaluating
from trainer.training.strategy import gathered

log = logging.getLogger(__name__)

Rows = TypeVar("Rows", list[Any], tuple[float, ...])
"""Values by row."""


class Measure(Protocol):
    """Measurement of the model in training."""

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether to measure after ``step`` steps, in addition to changes and ends of phases."""
        ...

    def measure(
        self, trainer: L.Trainer, module: LanguageModule, has_dropped: bool
    ) -> dict[str, float]:
        """Measure the present model; return the values for the next row of metrics.

        All ranks call this together. ``has_dropped``: whether an encoding was dropped.
        """
        ...


class Monitors(StepCallback):
    """Takes each measure when it is due, and all measures around changes of the model.

    These moments are: before the first step, for benchmarks of trained weights; directly after a
    change; after the last step of every phase. ``reaches`` and ``milestones`` are the results of
    lengths and benchmarks so far. They are saved, also by a run that measures no more.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        transitions: Transitions,
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        self.transitions, self.add_metrics = transitions, add_metrics
        self.phase_ends = {phase.end for phase in transitions.phases}
        self.reaches: list[Reach] = []
        self.milestones: list[Milestone] = []
        self.measures: list[Measure] = []
        self.first_measure: Measure | None = None
        if config.monitor.lengths_every is not None:
            self.measures.append(Lengths(config, corpus, ranks, self.reaches.append))
        if config.monitor.benchmarks.enabled:
            benchmarks = Benchmarks(config, corpus, ranks, self.milestones.append)
            self.measures.append(benchmarks)
            self.first_measure = benchmarks if config.model.is_trained else None
        if config.monitor.probe_every is not None:
            self.measures.append(Probe(config, corpus))

    def restore(self, state: RunState) -> None:
        """Restore the measurements so far."""
        self.reaches[:], self.milestones[:] = state.lengths, state.benchmarks

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Measure a model with trained weights before its first step."""
        if trainer.global_step == 0 and self.first_measure is not None and not self.milestones:
            self._take(self.first_measure, trainer, module)
            module.timer.read()  # exclude this time from the first row

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure directly after the model was changed."""
        if self.transitions.changed_at(trainer.global_step):
            for measure in self.measures:
                self._take(measure, trainer, module)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Take the measures that are due after a step."""
        step = trainer.global_step
        for measure in self.measures:
            if step in self.phase_ends or measure.is_due(module, step):
                self._take(measure, trainer, module)

    def _take(self, measure: Measure, trainer: L.Trainer, module: LanguageModule) -> None:
        self.add_metrics(measure.measure(trainer, module, self.transitions.has_dropped))


class Lengths:
    """Retrieval and held-out loss at several lengths, on the same validation text every time.

    The loss of a mixture is also measured for each of its texts, on its windows.
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, ranks: Ranks, remember: Callable[[Reach], None]
    ) -> None:
        assert config.monitor.lengths_every is not None
        self.config, self.every, self.remember = config, config.monitor.lengths_every, remember
        self.perplexity, self.statements = measurements(config, corpus, ranks)
        self.windows_of = windows_by_text(config, corpus, ranks)
        self.windows = RowsOfRank(config.monitor.windows, ranks)
        self.trials = RowsOfRank(config.monitor.trials, ranks)

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether to measure after ``step`` steps."""
        return step % self.every == 0

    def measure(
        self, trainer: L.Trainer, module: LanguageModule, has_dropped: bool
    ) -> dict[str, float]:
        """Read this rank's part; afterwards all ranks have the same values."""
        C, tokens = self.config.training_length, self.config.evaluation.batch_tokens
        lengths = tuple(self.perplexity.windows)
        retrieval: list[float] = []
        with evaluating(module) as model:
            readings = [Reading(model, length, None, tokens) for length in lengths]
            cells = [self._losses(reading) for reading in readings]
            if self.statements is not None:
                for reading in readings:
                    scores = self.trials.counted(self.statements.measure(reading)["scores"])
                    retrieval.append(sum(scores) / len(scores) * self.trials.weight)
        edges = cells[-1]["edges"]  # of the longest length
        losses = [loss * self.windows.weight for loss in cells[-1]["losses"]]
        loss = [cell["last_loss"] * self.windows.weight for cell in cells]
        counts = [len(places) for places in self.windows_of.values()]
        of_texts = [
            sum(cell["by_window"][place] for place in places)
            for cell in cells
            for places in self.windows_of.values()
        ]
        mine = torch.tensor([*loss, *retrieval, *losses, *counts, *of_texts], dtype=torch.float64)
        means = iter(trainer.strategy.reduce(mine.to(module.device)).tolist())
        by_length, retrieved, by_bucket, windows = (
            tuple(islice(means, len(part))) for part in (loss, retrieval, losses, counts)
        )
        step = trainer.global_step
        self.remember(Reach(step, has_dropped, C, lengths, by_length, retrieved, edges, by_bucket))
        metrics = {
            f"{name}{n // C}x": value
            for name, values in ((TEXT_LOSS, by_length), (RETRIEVAL, retrieved))
            for n, value in zip(lengths, values, strict=False)
        }
        for n in lengths:
            for name, count in zip(self.windows_of, windows, strict=True):
                total = next(means)
                if count:
                    metrics[f"{TEXT_LOSS}{n // C}x/{name}"] = total / count
        return metrics

    def _losses(self, reading: Reading) -> dict[str, Any]:
        """Return the losses at one length, without windows that another rank counts."""
        part = self.perplexity.read(reading)
        counted = {key: self.windows.counted(values) for key, values in part.items()}
        return self.perplexity.cell(reading.length, [counted])


@dataclass(frozen=True)
class RowsOfRank:
    """This rank's rows of ``count`` sequences.

    Ranks that share parameters must do the same forward passes, so every rank reads as many rows.
    Where ``count`` is no multiple of the ranks, the last row of some repeats one of another rank,
    and only that other rank counts it. The rows of all ranks are then the same on any number of
    ranks.
    """

    count: int
    ranks: Ranks

    @property
    def read(self) -> Integers:
        """Numbers of the rows to read."""
        rank, size = self.ranks.rank, self.ranks.world_size
        return np.arange(rank, -(-self.count // size) * size, size) % self.count

    @property
    def _count_own(self) -> int:
        return len(range(self.ranks.rank, self.count, self.ranks.world_size))

    @property
    def weight(self) -> float:
        """Weight of this rank's mean in the mean over all ranks; 0 if it repeats its only row."""
        return self._count_own * self.ranks.world_size / self.count

    def counted(self, values: Rows) -> Rows:
        """Return the values of rows that this rank counts, or of the one that it repeats."""
        return values[: max(self._count_own, 1)]


def check_monitored_text(config: RunConfig, corpus: Corpus) -> None:
    """Check that the validation text is long enough."""
    if config.monitor.lengths_every is None:
        return
    longest, text, C = max(config.monitor.lengths), corpus.validation, config.training_length
    if text.longest < longest * C:
        raise UserError.at(
            "monitor.lengths",
            f"the validation text has {text.longest} tokens, fewer than "
            f"{longest} times the training length of {C:,}; give more text, larger "
            "data.validation, or shorter lengths.",
        )


def measurements(
    config: RunConfig, corpus: Corpus, ranks: Ranks
) -> tuple[Perplexity, Statements | None]:
    """Return this rank's part of the validation text, with needles if training has them.

    Lengths count from the training length of the whole run in all its phases, as in its report.
    """
    monitor, needles, C = config.monitor, config.evaluation.needles, config.training_length
    lengths = [C * factor for factor in sorted(set(monitor.lengths))]
    text, first = corpus.validation, corpus.first_token
    windows = windows_with_common_ends(text, monitor.windows, lengths)
    rows = RowsOfRank(monitor.windows, ranks).read
    perplexity = Perplexity({n: read[rows] for n, read in windows.items()}, first, C, last=C)
    if not (config.data.needles.share and monitor.trials):
        return perplexity, None
    vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)
    counts = needles.needles, needles.seed, needles.changes
    asked = Statements.make(text, lengths, vocabulary, first, monitor.trials, *counts)
    rows = RowsOfRank(monitor.trials, ranks).read
    trials = {
        length: Trials(whole.prompts[rows], whole.answers[rows], whole.depths[rows])
        for length, whole in asked.trials.items()
    }
    return perplexity, Statements(trials, first)


def windows_by_text(config: RunConfig, corpus: Corpus, ranks: Ranks) -> dict[str, list[int]]:
    """Return the indices of each text's windows among those that this rank counts.

    A single text needs none: its loss is that of all windows.
    """
    text, longest = corpus.validation, config.training_length * max(config.monitor.lengths)
    if len(text.parts) == 1:
        return {}
    parts = text.parts_of_windows(text.shares(config.monitor.windows, longest))
    mine = parts[ranks.rank :: ranks.world_size]
    return {
        part.name: np.flatnonzero(mine == index).tolist() for index, part in enumerate(text.parts)
    }


class Probe:
    """Each measure of :func:`probe`, per layer and reduced over all layers.

    Every rank reads the same few sequences of the training length.
    """

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        assert config.monitor.probe_every is not None
        self.every = config.monitor.probe_every
        count, length = config.monitor.probe_sequences, config.training_length
        text = held_out_windows(corpus.validation, count, length)
        text[:, 0] = corpus.first_token  # as in training
        self.ids = torch.from_numpy(text)

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether to measure after ``step`` steps."""
        return step % self.every == 0

    def measure(
        self, trainer: L.Trainer, module: LanguageModule, has_dropped: bool
    ) -> dict[str, float]:
        """Measure all layers in one forward pass."""
        with evaluating(module) as model:
            measured = probe(model, self.ids)
        metrics: dict[str, float] = {}
        for name, layers in measured.items():
            each = {f"probe/{name}/layer_{i:02}": value for i, value in enumerate(layers)}
            metrics |= {f"probe/{name}": MEASURES[name](layers)} | each
        return metrics


class Benchmarks:
    """Scores of tasks as in DroPE's Fig. 10, on the same questions every time.

    The questions are divided among the ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        remember: Callable[[Milestone], None],
    ) -> None:
        self.config, self.ranks, self.remember = config, ranks, remember
        self.settings = config.monitor.benchmarks
        self.tasks, self.lengths = _tasks(config, corpus, ranks)
        self.encoder = Encoder(
            corpus.tokenizer, config.training_length, add_bos=True, eos=(corpus.end_of_text,)
        )
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
        scores_by_task = {}
        C, batch_tokens = self.config.training_length, self.config.evaluation.batch_tokens
        for task in self.tasks:
            for length in self.lengths:
                self._begin_task()
                has = task.sequences(length)
                cell = task.measure(Reading(model, length, None, batch_tokens)) if has else {}
                losses = _gathered(cell.get("by_window", ()))
                scores = _gathered(cell.get("scores", ()))
                value = float(np.exp(_mean(losses))) if losses else _mean(scores)
                scores_by_task[f"{task.key}/{length / C:g}x"] = value
        return scores_by_task

    def _of_questions(self, model: LanguageModel) -> dict[str, float]:
        scores_by_task = {}
        for task, questions in self.questions.items():
            self._begin_task()
            tokens = MultipleChoiceConfig.batch_tokens
            scores = []
            if questions:
                scores = score_questions(model, self.encoder, task, questions, tokens, silent=True)
            each = {score.metric: score.each for score in scores}
            for metric in ("acc", "acc_norm"):
                scores_by_task[f"{task}/{metric}"] = _mean(_gathered(each.get(metric, ())))
        return scores_by_task

    def _of_harness(self, model: LanguageModel) -> dict[str, float]:
        if not self.settings.harness:
            return {}
        from trainer.evaluation import harness

        self._begin_task()
        config = _harness_config(self.settings)
        scores = harness.score_tasks(model, self.encoder, config, self._spread, silent=True)
        return {f"harness/{score.task}/{score.metric}": score.value for score in scores}

    def _spread(
        self, items: Sequence[Any], compute: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Compute a part on every rank; return the results of all, in order."""
        rank, ranks = self.ranks.rank, self.ranks.world_size
        parts = all_gather(compute(items[rank::ranks]))
        results: list[Any] = [None] * len(items)
        for start, part in enumerate(parts):
            results[start::ranks] = part
        return results

    def _begin_task(self) -> None:
        """Extend the watchdog: a task may take as long as a first step."""
        watch(self.config.trainer.step_timeout, 10)


BENCHMARKS = "monitor.benchmarks"
"""Configuration key of the benchmarks."""


def benchmark_problems(config: RunConfig) -> list[Problem]:
    """Check that the benchmarks' data and packages are available; return a problem for each that is
    missing."""
    asked = config.monitor.benchmarks
    keys = {"evaluation.tasks": f"{BENCHMARKS}.multiple_choice", "evaluation": BENCHMARKS}
    problems = missing_tasks(_choice_config(asked)) if asked.multiple_choice else []
    problems = [problem.renamed(keys) for problem in problems]
    if asked.harness and find_spec("lm_eval") is None:
        problems.append(
            Problem(BENCHMARKS, "lm-eval is not installed; pip install 'unrope[eval]'.")
        )
    elif asked.harness:
        from trainer.evaluation.harness import task_problems

        keys = {"evaluation.tasks": f"{BENCHMARKS}.harness", "evaluation": BENCHMARKS}
        problems += [problem.renamed(keys) for problem in task_problems(_harness_config(asked))]
    return problems


def _tasks(
    config: RunConfig, corpus: Corpus, ranks: Ranks
) -> tuple[list[Measurement], tuple[int, ...]]:
    """Return this rank's part of the tasks with lengths, and their lengths."""
    asked, C = config.monitor.benchmarks, config.training_length
    lengths = [round(C * factor) for factor in sorted(set(asked.lengths))]
    if not asked.tasks:
        return [], ()
    text = HeldOut(corpus, corpus.validation, corpus.first_token, config.data.needles.share)
    with renaming(evaluation=BENCHMARKS):
        evaluation = config.evaluation.limited(asked.limit, asked.limit)
        evaluation = replace(evaluation, tasks=asked.tasks, windows=asked.limit, last=None)
        made, notes = make_tasks(text, evaluation, lengths, C)
        made = [replace(t, limit=asked.limit) if isinstance(t, Prompted) else t for t in made]
        check_prompts(made, lengths)
    for note in notes:
        log.warning("monitor.benchmarks.tasks: %s", note)
    return [task.part(ranks.rank, ranks.world_size) for task in made], tuple(lengths)


def _choice_config(asked: BenchmarksConfig) -> MultipleChoiceConfig:
    return MultipleChoiceConfig(asked.multiple_choice, directory=asked.directory)


def _harness_config(asked: BenchmarksConfig) -> HarnessConfig:
    return HarnessConfig(asked.harness, limit=asked.limit, include_path=asked.include_path)


def _questions(asked: BenchmarksConfig, ranks: Ranks) -> dict[str, list[Question]]:
    """Return this rank's part of every task's questions; tasks without questions are omitted."""
    directory = benchmark_directory(_choice_config(asked))
    questions_of_rank = {}
    for task in asked.multiple_choice:
        questions = read_questions(directory / f"{task}{SUFFIX}", asked.limit)
        share = questions[ranks.rank :: ranks.world_size]
        questions_of_rank[task] = [replace(question, unconditional=()) for question in share]
    return questions_of_rank


def _tokens(module: LanguageModule, step: int) -> int:
    return phase_before(module.phases, step).tokens_at(step)


def _gathered(values: Sequence[float]) -> list[float]:
    """Gather the values of all ranks."""
    return [value for of_rank in all_gather(list(values)) for value in of_rank]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
