"""Benchmarks of the model in training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L

from trainer.common.ranks import Ranks, all_gather
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.evaluation.measurements import Prompted, Reading
from trainer.evaluation.results import Milestone, is_known
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.lightning.callbacks import Metrics, StepCallback
from trainer.lightning.module import LanguageModule, evaluating
from trainer.lightning.phases import PhaseChange
from trainer.lightning.strategy import gathered
from trainer.runs.phases import phase_before


class Monitors(StepCallback):
    """Scores of tasks as in DroPE's Fig. 10, on the same questions every time.

    They are taken before the first step of trained weights, every so many steps, directly after a
    change of the model, and after the last step of every phase. The results are saved. Ranks share
    the questions.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        change: PhaseChange,
        metrics: Metrics,
    ) -> None:
        self.change, self.metrics, self.settings = change, metrics, config.benchmarks
        self.phase_ends = {phase.end for phase in change.phases}
        self.milestones: list[dict[str, Any]] = []
        self.is_trained = config.model.is_trained
        self.C, self.batch_tokens = config.training_length, config.evaluation.batch_tokens
        if self.settings.every is None:
            return
        asked = self.settings
        self.lengths = [round(self.C * factor) for factor in sorted(set(asked.lengths))]
        text = HeldOut(corpus, corpus.validation, corpus.first_token, config.data.needles.share)
        evaluation = config.evaluation.limited(asked.limit)
        evaluation = replace(evaluation, tasks=asked.tasks, windows=asked.limit, last=None)
        tasks, _ = make_tasks(text, evaluation, self.lengths, self.C)
        tasks = [replace(t, limit=asked.limit) if isinstance(t, Prompted) else t for t in tasks]
        check_prompts(tasks, self.lengths)
        self.tasks = [task.part(ranks.rank, ranks.world_size) for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far, as :class:`Milestone` holds them."""
        return {"benchmarks": [*self.milestones]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the measurements so far."""
        self.milestones[:] = state_dict["benchmarks"]

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Measure trained weights before the first step."""
        if trainer.global_step == 0 and self.is_trained and not self.milestones:
            self._measure(module, 0)

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure directly after the model was changed."""
        if self.change.changed_at(trainer.global_step):
            self._measure(module, trainer.global_step)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure after a step if it is due."""
        step = trainer.global_step
        if step in self.phase_ends or step % (self.settings.every or step + 1) == 0:
            self._measure(module, step)

    def _measure(self, module: LanguageModule, step: int) -> None:
        """Answer this rank's part of the questions; afterwards all ranks have the same scores."""
        if self.settings.every is None:
            return
        with self.metrics.elsewhere():
            scores = self._scores(module)
        tokens = phase_before(self.change.phases, step).tokens_at(step)
        self.milestones.append(asdict(Milestone(step, tokens, self.change.has_dropped, scores)))
        known = {f"benchmark/{key}": x for key, x in scores.items() if is_known(x)}
        self.metrics.add(known)

    def _scores(self, module: LanguageModule) -> dict[str, float | None]:
        """Return the scores by task and length."""
        scores: dict[str, float | None] = {}
        with evaluating(module) as model, gathered(module.model):
            for task in self.tasks:
                for length in self.lengths:
                    reading = Reading(model, length, None, self.batch_tokens)
                    cell = task.measure(reading) if task.sequences(length) else {}
                    losses = _gathered(cell.get("losses", ()))
                    hits = _mean(_gathered(cell.get("scores", ())))
                    name = f"{task.key}/{length / self.C:g}x"
                    scores[name] = math.exp(_mean(losses)) if losses else hits
        return scores


def _gathered(values: Sequence[float]) -> list[float]:
    """Gather the values of all ranks."""
    return [value for of_rank in all_gather(list(values)) for value in of_rank]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
