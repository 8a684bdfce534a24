"""What is measured of the model in training: held-out losses around its changes, and benchmarks.

Benchmarks are scores of tasks as in DroPE's Fig. 10. They are taken before the first step of
trained weights, every so many steps, directly after a change of the model, and after the last step
of every phase, on the same questions every time.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from trainer.common.processes import current_ranks
from trainer.common.ranks import all_gather
from trainer.data.corpus import Corpus
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.task import Task
from trainer.evaluation.tasks import make_tasks
from trainer.lightning.drop import losses_of
from trainer.lightning.module import evaluating
from trainer.lightning.strategy import whole_model
from trainer.model.decoder import Decoder
from trainer.runs.phases import Phase, Run

log = logging.getLogger(__name__)


class Measurements:
    """Measures a run's model, and keeps what checkpoints hold of that.

    ``state``: ``state.json`` of the checkpoint that the run begins with.
    """

    def __init__(self, run: Run, corpus: Corpus, state: dict[str, Any]) -> None:
        self.run = run
        self.corpus = corpus
        self.tasks = benchmark_tasks(run, corpus)
        self.effects: dict[str, dict[str, Any]] = dict(state.get("effects", {}))
        """Losses before and after the change of each phase, by its name."""
        self.milestones: list[dict[str, Any]] = list(state.get("benchmarks", ()))
        """Benchmarks so far, see :class:`~trainer.report.report.RunSummary`."""
        self.pending: dict[str, float] = dict(state.get("pending_metrics", {}))
        """More values of the next row."""

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.drop and phase.name in self.effects for phase in self.run.phases)

    def probe(self, phase: Phase) -> Sequence[Tensor]:
        """Return the text of a phase on which the effect of its change is measured, in batches."""
        text = self.corpus.mixed(phase.data)
        probe = torch.from_numpy(text.probe(self.run.config.drop.effect_sequences, phase.length))
        return probe.split(phase.rows(current_ranks().world_size))

    def note_change(self, phase: Phase, before: list[float], after: list[float]) -> None:
        """Note the losses of the probe's sequences before and after a phase's change."""
        loss_before, loss_after = fmean(before), fmean(after)
        self.effects[phase.name] = {
            "step": phase.start,
            "what": phase.description,
            "length": phase.length,
            "loss_before": loss_before,
            "loss_after": loss_after,
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        self.pending[f"{phase.key}/loss_before"] = loss_before
        self.pending[f"{phase.key}/loss_after"] = loss_after
        text = "Step %d: %s; held-out loss %.3f before, %.3f after"
        log.info(text, phase.start, phase.description, loss_before, loss_after)

    def measure_end(self, model: Decoder, phase: Phase) -> None:
        """Measure the held-out loss at the end of a phase that began with a change."""
        if phase.name not in self.effects:
            return
        losses = losses_of(model, self.probe(phase))
        loss = fmean(losses)
        effect = self.effects[phase.name]
        effect["loss_end"] = loss
        effect["sequences"]["end"] = losses
        self.pending[f"{phase.key}/loss_end"] = loss
        name = f"phase {phase.name!r}" if phase.drop is None else "recalibration"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, loss, name)

    def measure_benchmarks(self, model: Decoder, step: int) -> None:
        """Add a milestone after ``step`` updates: scores by task and length in training lengths,
        NaN without questions. Ranks share the questions, and get the same scores."""
        if not self.tasks:
            return
        phases = self.run.phases
        ranks = current_ranks()
        batch_tokens = self.run.config.evaluation.batch_tokens // ranks.world_size
        scores: dict[str, float] = {}
        with evaluating(model):
            whole = whole_model(model)
            for task in self.tasks:
                batches = task.batches(whole, batch_tokens)[ranks.rank :: ranks.world_size]
                values = [value for batch in batches for value in batch()]
                for key in task.titles:
                    scores_of_rank = [value for _, name, value in values if name == key]
                    all_scores = [*chain.from_iterable(all_gather(scores_of_rank))]
                    mean = sum(all_scores) / len(all_scores) if all_scores else math.nan
                    score = math.exp(min(mean, 700.0)) if task.metric == "loss" else mean
                    scores[f"{key}/{task.length / phases[-1].length:g}x"] = score
        tokens = phases.at(step).tokens_at(step)
        milestone = {"step": step, "tokens": tokens, "dropped": self.has_dropped, "scores": scores}
        self.milestones.append(milestone)
        for key, score in scores.items():
            if math.isfinite(score):
                self.pending[f"benchmark/{key}"] = score


def benchmark_tasks(run: Run, corpus: Corpus) -> list[Task]:
    """Return the tasks of a run, each at every length."""
    config = run.config.benchmarks
    if config.every is None:
        return []
    C = run.phases[-1].length
    lengths = sorted({round(C * factor) for factor in config.lengths})
    share = run.config.data.needles.share
    text = HeldOut(corpus, corpus.validation, (corpus.first_token,), share)
    evaluation = replace(
        run.config.evaluation, tasks=config.tasks, windows=config.limit, limit=config.limit
    )
    tasks, notes = make_tasks(text, evaluation, lengths, C)
    for note in notes:
        log.warning("benchmarks: %s", note)
    return tasks
