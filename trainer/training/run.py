"""The callback of a run: it changes the model at a phase's start, measures, logs, saves, stops."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from trainer.checkpoint import (
    BEFORE_DROP,
    Writer,
    is_due,
    read_state,
    regular_checkpoints,
    split_tensors,
    step_name,
)
from trainer.common.errors import STOP_REASONS, DivergedError, PreemptedError
from trainer.common.progress import Progress
from trainer.common.ranks import any_rank
from trainer.data.corpus import Corpus
from trainer.lightning.drop import apply_change
from trainer.lightning.module import Batch, LanguageModule
from trainer.runs.phases import Run, layout_of_phase
from trainer.training.internals import loops_at
from trainer.training.measurements import Measurements
from trainer.training.rows import Rows

log = logging.getLogger(__name__)

MOST_SKIPPED = 32
"""Updates skipped in a row, all with the same weights, after which a run ends with an error."""


class RunCallback(Checkpoint):
    """Changes the model at the start of each phase, measures, writes rows, saves and stops.

    A phase is an epoch of Lightning's. As a ``Checkpoint`` this callback follows all others, so
    that rows and checkpoints have what the others did in a step.

    ``state``: ``state.json`` of the checkpoint that the run begins with, or ``{"step": 0}``.
    ``stop_requested``: returns why this process must stop, if so.
    """

    def __init__(
        self,
        run: Run,
        module: LanguageModule,
        corpus: Corpus,
        state: dict[str, Any],
        writer: Writer,
        progress: Progress,
        stop_requested: Callable[[], str | None],
    ) -> None:
        self.run = run
        self.module = module
        self.corpus = corpus
        self.writer = writer
        self.stop_requested = stop_requested
        self.settings = run.config.trainer
        self.phase = run.phases.at(state["step"])
        self.measurements = Measurements(run, corpus, state)
        self.rows = Rows(run, corpus, progress, state.get("rows", 0))
        self.tally: dict[str, float] | None = state.get("tally")
        """Sums of the module at the checkpoint."""
        self.token_files: dict[str, str] = dict(state.get("token_files", {}))
        """Files of a published model about its tokens."""
        self.saved_at = time.monotonic()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Set Lightning's counters by the step: another number of ranks has other batches."""
        assert self.tally is not None
        self.module.tally.load(self.tally, self.module.device)
        step = checkpoint["global_step"]
        ranks = trainer.world_size
        done = [phase for phase in self.run.phases if phase.end <= step]
        checkpoint["loops"] = loops_at(
            trainer,
            epoch=sum(phase.end > phase.start for phase in done),
            batches=(step - self.phase.start) * self.phase.micro_batches(ranks),
            batches_before=sum((p.end - p.start) * p.micro_batches(ranks) for p in done),
            step=step,
        )

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Check states that checkpoints will hold, measure trained weights, and start the clock."""
        callbacks: list[L.Callback] = getattr(trainer, "callbacks")  # noqa: B009 - not declared
        for callback in callbacks:
            split_tensors(callback.state_dict(), f"callbacks.{callback.state_key}", {})
        if trainer.global_step == 0 and self.run.weights is not None:
            self.measurements.measure_benchmarks(self.module.model, 0)
        self.rows.start(trainer.global_step)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin a phase: Lightning does not call this in a run that resumes within one."""
        self.phase = self.run.phases.at(trainer.global_step)
        is_longer = self.phase.length > self.module.model.layout.training_length
        if self.phase.has_change or is_longer:
            self.change(trainer)
        self.rows.start(trainer.global_step)

    def change(self, trainer: L.Trainer) -> None:
        """Change the model for its phase, and measure it before and after."""
        phase = self.phase
        model = self.module.model
        if phase.drop is not None and not self.measurements.has_dropped:
            self.save(trainer, BEFORE_DROP)
        before, after = apply_change(
            trainer,
            model,
            layout_of_phase(self.run.config, phase, model.layout),
            gain="one" if phase.drop is None else phase.drop.qk_norm_gain,
            optimizer_state=phase.optimizer_state,
            probe=self.measurements.probe(phase),
        )
        self.measurements.note_change(phase, before, after)
        self.measurements.measure_benchmarks(model, phase.start)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Measure, write a row, save and stop, in this order, after an update."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches != 0:
            return
        step = trainer.global_step
        phase = self.phase
        measurements = self.measurements
        is_last = step == phase.end
        if is_last or is_due(step, self.run.config.benchmarks.every):
            with self.rows.untimed():
                if is_last:
                    measurements.measure_end(self.module.model, phase)
                measurements.measure_benchmarks(self.module.model, step)
        if is_last or is_due(step, self.settings.log_every):
            self.rows.write(trainer, self.module, phase, batch, measurements.pending)
            measurements.pending = {}
        if not is_last:
            self.save_or_stop(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save after a phase, when the other callbacks have ended its epoch."""
        self.save_or_stop(trainer)

    def save_or_stop(self, trainer: L.Trainer) -> None:
        """Save if a checkpoint is due, and stop if a rank is asked to; all ranks do the same.

        Raises:
            PreemptedError: a rank is asked to stop.
            DivergedError: the run has diverged; a control goes on, for the sake of its comparison.
        """
        step = trainer.global_step
        tally = self.module.tally
        skipped = tally.lately_skipped_in_a_row()
        is_end = step == self.run.steps
        requested = None if is_end else self.stop_requested()
        minutes_since_save = (time.monotonic() - self.saved_at) / 60
        # Clocks of ranks differ, and signals: all save and stop after the same step, and say why.
        is_late, has_failed, is_diverging, *reasons = any_rank(
            minutes_since_save > (self.settings.checkpoint_minutes or math.inf),
            self.writer.has_failed,
            skipped >= MOST_SKIPPED,
            *(requested == reason for reason in STOP_REASONS),
        )
        if has_failed:
            self.writer.wait()  # raises its error
        if is_diverging and not self.run.is_control:
            self.writer.wait()  # the newest healthy checkpoint may be on its way to disk
            check_divergence(tally.skipped_in_a_row(), step, self.writer.directory)
        stops = any(reasons)
        must_save = step == self.phase.end or step in self.run.kept_steps or stops
        may_save = is_late or is_due(step, self.settings.checkpoint_every)
        # While updates are skipped, nothing is saved by schedule: the newest checkpoint is healthy.
        if must_save or (may_save and tally.skipped_in_a_row() == 0):
            self.save(trainer, step_name(step))
        if stops or is_end:
            self.writer.wait()
        if stops:
            reason = STOP_REASONS[reasons.index(True)]
            text = f"Stopped after step {step} ({reason}), checkpoint saved."
            raise PreemptedError(text, reason)

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint of the present state beside training; all ranks call this together."""
        with self.rows.untimed():
            trainer.save_checkpoint(self.writer.directory / name)
        self.saved_at = time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return what ``state.json`` of a checkpoint holds of the run."""
        measurements = self.measurements
        return {
            "step": self.module.global_step,
            "model": asdict(self.module.model.config),
            "tokenizer": self.corpus.tokenizer.to_str(),
            "end_of_text": self.corpus.end_of_text,
            "token_files": self.token_files,
            "config": asdict(self.run.config),
            "texts": self.corpus.fingerprints,
            "tally": self.module.tally.state(),
            "rows": self.rows.count,
            "pending_metrics": dict(measurements.pending),
            "effects": dict(measurements.effects),
            "benchmarks": list(measurements.milestones),
        }


def check_divergence(in_a_row: int, step: int, directory: Path) -> None:
    """Raise if too many updates in a row, until ``step``, had no finite loss and gradient."""
    if in_a_row < MOST_SKIPPED:
        return
    first = step - in_a_row + 1
    paths = [*directory.glob(BEFORE_DROP), *regular_checkpoints(directory)]
    healthy = [path for path in paths if read_state(path)["step"] < first]
    hint = f"the last healthy checkpoint is {healthy[-1]}" if healthy else "no healthy checkpoint"
    raise DivergedError(
        f"the loss or the gradient was not finite in steps {first} to {step}; {hint}"
    )
