"""The callback of a run: it changes the model at a phase's start, measures, logs, saves, stops."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from trainer.checkpoint import (
    BEFORE_DROP,
    Writer,
    regular_checkpoints,
    split_tensors,
    step_name,
    step_of,
)
from trainer.common.errors import STOP_REASONS, DivergedError, PreemptedError
from trainer.common.progress import Progress
from trainer.common.ranks import any_rank, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, held_out_windows
from trainer.lightning.drop import Gain, apply_change, losses_of
from trainer.lightning.module import Batch, LanguageModule
from trainer.runs.phases import Phase, kept_steps, layout_of_phase, phase_at, phases_of
from trainer.training.benchmarks import benchmark_scores, benchmark_tasks
from trainer.training.internals import loops_at
from trainer.training.rows import Rows

log = logging.getLogger(__name__)

MOST_SKIPPED = 32
"""Updates skipped in a row after which a run ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


class RunCallback(Checkpoint):
    """Changes the model at the start of each phase, measures, writes rows, saves and stops.

    A phase is an epoch of Lightning's. As a ``Checkpoint`` this callback follows all others, so
    that rows and checkpoints have what the others did in a step.

    Args:
        config: the run.
        corpus: its text.
        state: ``state.json`` of the checkpoint that it begins with, or ``{"step": 0}``.
        writer: writes its checkpoints.
        progress: the bar.
        stop_requested: returns why this process is asked to stop, or None.
        is_control: see :func:`~trainer.training.fit.train`.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        state: dict[str, Any],
        *,
        writer: Writer,
        progress: Progress,
        stop_requested: Callable[[], str | None],
        is_control: bool = False,
    ) -> None:
        self.config, self.corpus, self.writer = config, corpus, writer
        self.stop_requested, self.is_control = stop_requested, is_control
        self.phases = phases_of(config)
        self.phase = phase_at(self.phases, state["step"])
        self.rows = Rows(config, corpus, self.phases, progress, state.get("rows", 0))
        self.benchmarks = benchmark_tasks(config, corpus)
        self.kept_steps = kept_steps(config)
        self.tally: dict[str, float] | None = state.get("tally")
        """Sums of the module at the checkpoint."""
        self.saved_at = time.monotonic()
        # What checkpoints hold of the run besides weights:
        self.effects: dict[str, dict[str, Any]] = dict(state.get("effects", {}))
        """Losses before and after the change of each phase, by its name."""
        self.milestones: list[dict[str, Any]] = list(state.get("benchmarks", ()))
        """Benchmarks so far, see :class:`~trainer.report.report.RunSummary`."""
        self.pending: dict[str, float] = dict(state.get("pending_metrics", {}))
        """More values of the next row."""
        self.token_files: dict[str, str] = dict(state.get("token_files", {}))
        """Files of a published model about its tokens."""

    # The start of a run and of a phase

    def on_load_checkpoint(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, checkpoint: dict[str, Any]
    ) -> None:
        """Set Lightning's counters by the step: another number of ranks has other batches."""
        assert self.tally is not None
        module.tally.load(self.tally, module.device)
        step, ranks = checkpoint["global_step"], trainer.world_size
        done = [phase for phase in self.phases if phase.end <= step]
        checkpoint["loops"] = loops_at(
            trainer,
            epoch=sum(phase.settings.steps > 0 for phase in done),
            batches=(step - self.phase.start) * self.phase.config.trainer.accumulation(ranks),
            batches_before=sum(
                phase.settings.steps * phase.config.trainer.accumulation(ranks) for phase in done
            ),
            step=step,
        )

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Check states that checkpoints will hold, measure trained weights as they are, and start
        the clock."""
        callbacks: list[L.Callback] = getattr(trainer, "callbacks")  # noqa: B009 - not declared
        for callback in callbacks:
            split_tensors(callback.state_dict(), f"callbacks.{callback.state_key}", {})
        if trainer.global_step == 0 and self.config.model.is_trained:
            self.measure_benchmarks(module, 0)
        self.rows.start(trainer.global_step)

    def on_train_epoch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Begin a phase: Lightning does not call this in a run that resumes within one."""
        self.phase = phase_at(self.phases, trainer.global_step)
        longer = self.phase.config.data.sequence_length > module.model.layout.training_length
        if self.phase.change or longer:
            self.change(trainer, module)
        self.rows.start(trainer.global_step)

    def change(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Change the model for its phase, and measure the held-out loss before and after."""
        phase, drop, step = self.phase, self.phase.settings.drop, trainer.global_step
        if drop and not self.has_dropped:
            self.save(trainer, BEFORE_DROP)
        gain: Gain = "one"
        if drop and module.model.config.qk_norm.when == "after_drop":
            gain = drop.qk_norm_gain
        before, after = apply_change(
            trainer,
            module.model,
            layout_of_phase(module.model.layout, phase),
            gain=gain,
            optimizer_state=phase.settings.optimizer_state,
            probe=self.probe(),
        )
        loss_before, loss_after = fmean(before), fmean(after)
        self.effects[phase.name] = {
            "step": step,
            "what": phase.description,
            "length": phase.config.data.sequence_length,
            "loss_before": loss_before,
            "loss_after": loss_after,
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        self.pending[f"{phase.key}/loss_before"] = loss_before
        self.pending[f"{phase.key}/loss_after"] = loss_after
        text = "Step %d: %s; held-out loss %.3f before, %.3f after"
        log.info(text, step, phase.description, loss_before, loss_after)
        self.measure_benchmarks(module, step)

    # The end of an update and of a phase

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        """Measure, write a row, save and stop, in this order, after an update."""
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        phase, step = self.phase, trainer.global_step
        is_last = step == phase.end
        if is_last and phase.name in self.effects:
            self.measure_effect(module)
        if is_last or is_due(step, self.config.benchmarks.every):
            self.measure_benchmarks(module, step)
        if is_last or is_due(step, self.config.trainer.log_every):
            self.rows.write(trainer, module, phase, batch, self.pending)
            self.pending = {}
        if not is_last:
            self.save_or_stop(trainer, module)

    def on_train_epoch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Save after a phase, when the other callbacks have ended its epoch."""
        self.save_or_stop(trainer, module)

    def save_or_stop(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save if a checkpoint is due, and stop if a rank is asked to; all ranks do the same."""
        step, settings = trainer.global_step, self.config.trainer
        reason = self.stop_requested()
        minutes = (time.monotonic() - self.saved_at) / 60
        # Clocks of ranks differ, and signals: all save and stop after the same step, and say why.
        is_late, has_failed, diverged, *reasons = any_rank(
            minutes > (settings.checkpoint_minutes or math.inf),
            self.writer.has_failed,
            module.tally.lately_skipped_in_a_row() >= MOST_SKIPPED,
            *(reason == known and step < settings.max_steps for known in STOP_REASONS),
        )
        stops = any(reasons)
        if has_failed:
            self.writer.wait()  # raises its error
        if diverged and not self.is_control:
            check_divergence(module.tally.skipped_in_a_row(), step, self.writer.directory)
        must_save = step == self.phase.end or step in self.kept_steps or stops
        may_save = is_late or is_due(step, settings.checkpoint_every)
        # While updates are skipped, nothing is saved by schedule: the newest checkpoint is healthy.
        if must_save or (may_save and not module.tally.skipped_in_a_row()):
            self.save(trainer, step_name(step))
        if stops or step == settings.max_steps:
            self.writer.wait()
        if stops:
            reason = STOP_REASONS[reasons.index(True)]
            text = f"Stopped after step {step} ({reason}), checkpoint saved."
            raise PreemptedError(text, reason)

    # Measurements

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.settings.drop and phase.name in self.effects for phase in self.phases)

    def probe(self) -> Sequence[Tensor]:
        """Return the probe of the phase, see :func:`effect_probe`, in micro-batches."""
        run = self.phase.config.trainer
        rows = run.micro_batch_size or run.batch_size // current_ranks().world_size
        return effect_probe(self.corpus, self.phase).split(rows)

    def measure_effect(self, module: LanguageModule) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        phase, effect = self.phase, self.effects[self.phase.name]
        with self.rows.untimed():
            losses = losses_of(module.model, self.probe())
        sequences = effect["sequences"] | {"end": losses}
        self.effects[phase.name] = effect | {"loss_end": fmean(losses), "sequences": sequences}
        self.pending[f"{phase.key}/loss_end"] = fmean(losses)
        name = "recalibration" if phase.settings.drop else f"phase {phase.name!r}"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, fmean(losses), name)

    def measure_benchmarks(self, module: LanguageModule, step: int) -> None:
        """Add a milestone after ``step`` updates, the same on all ranks."""
        if not self.benchmarks:
            return
        with self.rows.untimed():
            scores = benchmark_scores(module.model, self.benchmarks, self.config)
        tokens = phase_at(self.phases, step).tokens_at(step)
        milestone = {"step": step, "tokens": tokens, "dropped": self.has_dropped, "scores": scores}
        self.milestones.append(milestone)
        self.pending |= {f"benchmark/{key}": x for key, x in scores.items() if math.isfinite(x)}

    # Checkpoints

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint of the present state beside training; all ranks call this together."""
        with self.rows.untimed():
            trainer.save_checkpoint(self.writer.directory / name)
        self.saved_at = time.monotonic()

    def describe(self, module: LanguageModule) -> dict[str, Any]:
        """Return what ``state.json`` of a checkpoint holds of the run."""
        return {
            "step": module.global_step,
            "model": asdict(module.model.config),
            "tokenizer": self.corpus.tokenizer.to_str(),
            "end_of_text": self.corpus.end_of_text,
            "token_files": self.token_files,
            "config": asdict(self.config),
            "texts": self.corpus.fingerprints,
            "tally": module.tally.state(),
            "rows": self.rows.count,
            "pending_metrics": dict(self.pending),
            "effects": dict(self.effects),
            "benchmarks": list(self.milestones),
        }


def is_due(step: int, every: int | None) -> bool:
    """Whether a step is a multiple of ``every``; None: never."""
    return every is not None and step % every == 0


def effect_probe(corpus: Corpus, phase: Phase) -> Tensor:
    """Return the validation text ``[sequences, T + 1]`` on which the effect of a change is
    measured; a mixture has the weights of the phase."""
    data, count = phase.config.data, phase.config.drop.effect_sequences
    windows = held_out_windows(corpus.mixed(data).validation, count, data.sequence_length)
    return F.pad(torch.from_numpy(windows), (1, 0), value=corpus.first_token)


def check_divergence(in_a_row: int, step: int, directory: Path) -> None:
    """Raise if too many updates in a row, until ``step``, had no finite loss and gradient."""
    if in_a_row >= MOST_SKIPPED:
        paths = [p for p in regular_checkpoints(directory) if step_of(p) <= step - in_a_row]
        raise DivergedError(
            f"the loss or the gradient was not finite in steps {step - in_a_row + 1} to {step}; "
            f"the last healthy checkpoint is {str(paths[-1]) if paths else None}"
        )
