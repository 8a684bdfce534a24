"""Measurements during training on one schedule: lengths, benchmarks, attention statistics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import lightning as L
import torch

from trainer.analysis.attention import probe
from trainer.common.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.dataset import held_out_windows
from trainer.data.needles import NeedleVocabulary
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.results import Milestone, Reach
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.runs.saved_state import RunState
from trainer.training.callbacks.benchmarks import Benchmarks
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule, begins_step, ends_step, evaluating


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


class Monitors(L.Callback):
    """Takes every measure that is due, and all of them around changes of the model.

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

    def on_train_batch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Measure directly after the model was changed."""
        if begins_step(trainer, index) and self.transitions.changed_at(trainer.global_step):
            for measure in self.measures:
                self._take(measure, trainer, module)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Take the measures that are due after a step."""
        if not ends_step(trainer, index):
            return
        step = trainer.global_step
        ends_phase = step in self.phase_ends or module.phase_ended
        for measure in self.measures:
            if ends_phase or measure.is_due(module, step):
                self._take(measure, trainer, module)

    def _take(self, measure: Measure, trainer: L.Trainer, module: LanguageModule) -> None:
        self.add_metrics(measure.measure(trainer, module, self.transitions.has_dropped))


class Lengths:
    """Retrieval and held-out loss at several lengths, on the same validation text every time."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, ranks: Ranks, remember: Callable[[Reach], None]
    ) -> None:
        assert config.monitor.lengths_every is not None
        self.config, self.every, self.remember = config, config.monitor.lengths_every, remember
        self.perplexity, self.statements = measurements(config, corpus, ranks)

    def is_due(self, module: LanguageModule, step: int) -> bool:
        """Whether to measure after ``step`` steps."""
        return step % self.every == 0

    def measure(
        self, trainer: L.Trainer, module: LanguageModule, has_dropped: bool
    ) -> dict[str, float]:
        """Read this rank's part; afterwards all ranks have the same values."""
        C, tokens = self.config.data.sequence_length, self.config.evaluation.batch_tokens
        lengths = tuple(self.perplexity.windows)
        retrieval: list[float] = []
        with evaluating(module) as model:
            cells = [self.perplexity.measure(model, length, None, tokens) for length in lengths]
            if self.statements is not None:
                for length in lengths:
                    scores = self.statements.measure(model, length, None, tokens)["scores"]
                    retrieval.append(sum(scores) / len(scores))
        edges, losses = cells[-1]["edges"], cells[-1]["losses"]  # of the longest length
        loss = [cell["last_loss"] for cell in cells]
        mine = torch.tensor([*loss, *retrieval, *losses], dtype=torch.float64)
        means = iter(trainer.strategy.reduce(mine.to(module.device)).tolist())
        by_length, retrieved, by_bucket = (
            tuple(islice(means, len(part))) for part in (loss, retrieval, losses)
        )
        step = trainer.global_step
        self.remember(Reach(step, has_dropped, C, lengths, by_length, retrieved, edges, by_bucket))
        return {
            f"length/{name}_{n // C}x": value
            for name, values in (("loss", by_length), ("retrieval", retrieved))
            for n, value in zip(lengths, values, strict=False)
        }


def check_monitored_text(config: RunConfig, corpus: Corpus) -> None:
    """Check that the validation text is long enough.

    Raises:
        UserError: it is too short.
    """
    if config.monitor.lengths_every is None:
        return
    longest, text = max(config.monitor.lengths), corpus.validation
    if len(text) < longest * config.data.sequence_length:
        raise UserError.at(
            "monitor.lengths",
            f"the validation text has {len(text)} tokens, fewer than {longest} times "
            "data.sequence_length; give more text, larger data.validation, or shorter lengths.",
        )


def measurements(
    config: RunConfig, corpus: Corpus, ranks: Ranks
) -> tuple[Perplexity, Statements | None]:
    """Return this rank's part of the validation text, with needles if training has them."""
    monitor, needles, C = config.monitor, config.evaluation.needles, config.data.sequence_length
    lengths = [C * factor for factor in sorted(set(monitor.lengths))]
    text, end = corpus.validation, corpus.end_of_text

    def whole(count: int) -> int:
        return -(-count // ranks.world_size) * ranks.world_size

    windows = windows_with_common_ends(text, whole(monitor.windows), lengths)
    perplexity = Perplexity(windows, end, C, last=C).part(ranks.rank, ranks.world_size)
    if not (config.data.needles.share and monitor.trials):
        return perplexity, None
    vocabulary = NeedleVocabulary.of(corpus.tokenizer)
    counts = needles.needles, needles.seed, needles.changes
    statements = Statements.of(text, lengths, vocabulary, end, whole(monitor.trials), *counts)
    return perplexity, statements.part(ranks.rank, ranks.world_size)


class Probe:
    """Each measure of :func:`probe`, per layer and over all layers.

    Over all layers it is the mean, and the maximum for the largest logit. Every rank reads the same
    few sequences of the training length.
    """

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        assert config.monitor.probe_every is not None
        self.every = config.monitor.probe_every
        count, length = config.monitor.probe_sequences, config.data.sequence_length
        text = held_out_windows(corpus.validation, count, length)
        text[:, 0] = corpus.end_of_text  # as in training
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
            whole = max(layers) if name == "largest_logit" else sum(layers) / len(layers)
            each = {f"probe/{name}/layer_{i:02}": value for i, value in enumerate(layers)}
            metrics |= {f"probe/{name}": whole} | each
        return metrics
