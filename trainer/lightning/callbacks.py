"""Steps of a run: two callbacks around the user's own, and the run that they act on.

:class:`PhaseStart` comes first: it restores a checkpoint and changes the model. :class:`StepEnd`
comes last: it measures, writes a row, saves and stops.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
import torch

from trainer.checkpoint import (
    BEFORE_DROP,
    Writer,
    regular_checkpoints,
    restore,
    step_name,
    step_of,
)
from trainer.common.errors import DivergedError, PreemptedError
from trainer.common.progress import Progress
from trainer.common.ranks import Ranks, Vote
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, held_out_windows
from trainer.data.dataset import as_batch
from trainer.data.tokenizer import same_tokens
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.benchmarks import Benchmarks
from trainer.lightning.drop import Probe, apply_change, losses_of
from trainer.lightning.metrics import Metrics
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.setup import make_callbacks, peak_of_ranks
from trainer.runs.phases import Phase, kept_steps, layout_of_phase, phase_before, phases_of
from trainer.runs.starting_point import Start, data_fingerprints, epochs_read

log = logging.getLogger(__name__)


class Run:
    """Parts of a run that live through its phases, and the contents of its checkpoints.

    ``step``: updates done. ``effects``: losses before and after the change of each phase, by its
    name.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        start: Start,
        weights: Pretrained | None,
        ranks: Ranks,
        progress: Progress,
    ) -> None:
        self.config, self.corpus, self.ranks = config, corpus, ranks
        self.checkpoints = Path(config.run_dir) / "checkpoints"
        self.start, self.step = start, start.step
        self.phases, self.permanent = phases_of(config), kept_steps(config)
        self.effects: dict[str, dict[str, Any]] = dict(start.state.get("effects", {}))
        self.metrics = Metrics(
            Path(config.run_dir) / "metrics.csv",
            self.phases,
            epochs_read(corpus, self.phases),
            progress,
            peak_of_ranks(config),
        )
        self.metrics.pending |= start.state.get("pending_metrics", {})
        self.benchmarks = Benchmarks(config, corpus, ranks)
        self.benchmarks.milestones += start.state.get("benchmarks", ())
        self.user_callbacks = make_callbacks(config.callbacks)
        keep = config.trainer.keep_checkpoints, config.trainer.keep_every
        self.writer = Writer(self.checkpoints, *keep, self.permanent)
        self.saved_at, self.save_vote = time.monotonic(), Vote()
        # The published model's files about tokens, unless this run has another tokenizer.
        self.token_files: dict[str, str] = start.state.get("token_files", {})
        if weights is not None:
            theirs = weights.tokenizer
            if theirs is None or same_tokens(theirs, corpus.tokenizer):
                self.token_files = dict(weights.token_files)

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.settings.drop and phase.name in self.effects for phase in self.phases)

    def restore(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Restore the checkpoint, once, when model and optimizer are on their devices."""
        state = self.start.state
        if self.start.checkpoint is None or self.step != self.start.step:
            return
        restore(module.model, trainer.optimizers[0], self.start.checkpoint)
        module.tally.load(state["tally"], module.device)
        for callback in self.user_callbacks:
            if callback.state_key in state["user_callbacks"]:
                callback.load_state_dict(state["user_callbacks"][callback.state_key])

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint of the present state beside training; all ranks call this together."""
        step, corpus, module = trainer.global_step, self.corpus, trainer.lightning_module
        assert isinstance(module, LanguageModule)
        phase = phase_before(self.phases, step)
        with self.metrics.elsewhere():
            state = {
                "step": step,
                "tokens": phase.tokens_at(step),
                "model": asdict(module.model.config),
                "layout": module.model.layout.to_dict(),
                "tokenizer": corpus.tokenizer.to_str(),
                "end_of_text": corpus.end_of_text,
                "token_files": self.token_files,
                "config": asdict(self.config),
                "data": data_fingerprints(corpus, phase),
                "tally": module.tally.state(),
                "pending_metrics": dict(self.metrics.pending),
                "effects": dict(self.effects),
                "benchmarks": [*self.benchmarks.milestones],
                "user_callbacks": {c.state_key: c.state_dict() for c in self.user_callbacks},
            }
            self.writer.save(name, module.model, trainer.optimizers[0], state)
        self.saved_at, self.save_vote = time.monotonic(), Vote()

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint is due by steps or by time; all ranks call this at every step."""
        run, minutes = self.config.trainer, (time.monotonic() - self.saved_at) / 60
        # Clocks of ranks differ: all save after the step at which they know of the first.
        by_time = run.checkpoint_minutes is not None and self.save_vote.agreed(
            minutes > run.checkpoint_minutes
        )
        return by_time or step % run.checkpoint_every == 0

    def probe(self, phase: Phase) -> Probe:
        """Return the text of :func:`effect_probe`, in passes of a micro-batch."""
        run, ranks = phase.config.trainer, self.ranks.world_size
        return effect_probe(self.corpus, run.batch_size // (run.accumulation(ranks) * ranks), phase)

    def measure(self, module: LanguageModule, step: int) -> None:
        """Measure the benchmarks after ``step`` updates."""
        if self.config.benchmarks.every is None:
            return
        tokens = phase_before(self.phases, step).tokens_at(step)
        with self.metrics.elsewhere():
            scores = self.benchmarks.measure(module, step, tokens, self.has_dropped)
        self.metrics.pending |= scores


class PhaseStart(L.Callback):
    """Restores the checkpoint of a resumed run, and changes the model where a phase begins.

    A resumed run repeats no change: the layout is in the checkpoint.
    """

    def __init__(self, run: Run, phase: Phase) -> None:
        self.run, self.phase = run, phase

    def on_fit_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Restore before all other callbacks begin."""
        self.run.restore(trainer, module)
        # Lightning has no public way to begin at a step without a checkpoint of its own.
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.run.step

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Measure trained weights; change the model, and measure the held-out loss around it."""
        run, phase, step, model = self.run, self.phase, trainer.global_step, module.model
        if step == 0 and run.config.model.is_trained and not run.benchmarks.milestones:
            run.measure(module, 0)
        longer = phase.config.data.sequence_length > model.layout.training_length
        begins = phase.start == step and phase.name not in run.effects
        if not begins or not (phase.change or longer):
            return
        drop = phase.settings.drop
        if drop and not run.has_dropped:
            run.save(trainer, BEFORE_DROP)
        norms_come_on = model.config.qk_norm.when == "after_drop"
        before, after = apply_change(
            trainer,
            module,
            layout_of_phase(model.layout, phase),
            gain=drop.qk_norm_gain if drop and norms_come_on else "one",
            optimizer_state=phase.settings.optimizer_state,
            probe=run.probe(phase),
        )
        run.effects[phase.name] = {
            "step": step,
            "what": phase.description,
            "length": phase.config.data.sequence_length,
            "loss_before": fmean(before),
            "loss_after": fmean(after),
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        run.metrics.pending |= {
            f"{phase.key}/loss_before": fmean(before),
            f"{phase.key}/loss_after": fmean(after),
        }
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            *(step, phase.description, fmean(before), fmean(after)),
        )
        run.measure(module, step)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the updates done, for the next phase."""
        self.run.step = trainer.global_step


class StepEnd(L.Callback):
    """Measures, writes a row, saves and stops, in this order, after a step's last micro-batch.

    Nothing is saved by schedule while updates are being skipped: the newest checkpoint is healthy.
    All ranks stop after the same step.

    Args:
        run: the run.
        phase: the present phase.
        stop: the request to stop.
        ends_diverged: raise when :data:`MOST_SKIPPED` updates in a row were skipped.
    """

    def __init__(self, run: Run, phase: Phase, stop: StopRequest, ends_diverged: bool) -> None:
        self.run, self.phase, self.stop, self.ends_diverged = run, phase, stop, ends_diverged

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock, and take signals from Lightning, which would act within a step."""
        self.run.metrics.start(trainer.global_step)
        self.stop.install()

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        """Act after a step's last micro-batch."""
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        run, phase, step = self.run, self.phase, trainer.global_step
        settings, is_last = run.config.trainer, step == phase.end
        if is_last and phase.name in run.effects:
            self._measure_effect(module)
        if is_last or step % (run.config.benchmarks.every or step + 1) == 0:
            run.measure(module, step)
        if is_last or step % settings.log_every == 0:
            self._write_row(trainer, module, batch)
        is_due = run.is_save_due(step) and not module.tally.skipped_in_a_row()
        reason = None if step == settings.max_steps else self.stop.agreed()
        if is_last or reason is not None or is_due or step in run.permanent:
            run.save(trainer, step_name(step))
        if is_last or reason is not None:
            run.writer.wait()
        if reason is not None:
            text = f"Stopped after step {step} ({reason}), checkpoint saved."
            raise PreemptedError(text, reason)

    def _write_row(self, trainer: L.Trainer, module: LanguageModule, batch: Batch) -> None:
        """Write a row of metrics; a run that diverged ends with it."""
        self.run.metrics.write(trainer, module, self.phase, batch)
        if self.ends_diverged:
            in_a_row = module.tally.skipped_in_a_row()
            check_divergence(in_a_row, trainer.global_step, self.run.checkpoints)

    def _measure_effect(self, module: LanguageModule) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        run, phase = self.run, self.phase
        with run.metrics.elsewhere():
            losses = losses_of(module, run.probe(phase))
        effect = run.effects[phase.name]
        sequences = effect["sequences"] | {"end": losses}
        run.effects[phase.name] = effect | {"loss_end": fmean(losses), "sequences": sequences}
        run.metrics.pending[f"{phase.key}/loss_end"] = fmean(losses)
        name = "recalibration" if phase.settings.drop else f"phase {phase.name!r}"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, fmean(losses), name)


def effect_probe(corpus: Corpus, rows: int, phase: Phase) -> Probe:
    """Return the validation text on which the effect of a change is measured.

    A mixture has the weights of the phase. ``rows``: most sequences of a forward pass; all parts
    have the same number.
    """
    count, length = phase.config.drop.effect_sequences, phase.config.data.sequence_length
    text = corpus.mixed(phase.config.data).validation
    windows = held_out_windows(text, count, length)
    weights = np.ones(windows.shape, dtype=np.float32)
    batch = as_batch(windows, corpus.first_token, corpus.end_of_text, weights)
    rows = next(n for n in range(min(rows, count), 0, -1) if count % n == 0)
    parts = (torch.split(batch[key], rows) for key in ("input_ids", "labels"))
    return list(zip(*parts, strict=True))


MOST_SKIPPED = 32
"""Updates skipped in a row after which a run ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


def check_divergence(in_a_row: int, step: int, directory: Path) -> None:
    """Raise if too many updates in a row, until ``step``, had no finite loss and gradient."""
    if in_a_row >= MOST_SKIPPED:
        paths = [p for p in regular_checkpoints(directory) if step_of(p) <= step - in_a_row]
        raise DivergedError(
            f"the loss or the gradient was not finite in steps {step - in_a_row + 1} to {step}; "
            f"the last healthy checkpoint is {str(paths[-1]) if paths else None}"
        )


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Request to stop: a signal, or the end of ``trainer.max_time`` since ``start_time``.

    SLURM announces preemption with SIGTERM, and the end of a job with the signal of ``--signal``. A
    second Ctrl-C ends the process immediately. All ranks agree without a host sync.
    """

    def __init__(self, max_time: str | None, start_time: float) -> None:
        self.signal: str | None = None
        self._vote, self.deadline = Vote(), math.inf
        if max_time is not None:
            hours, minutes, seconds = map(int, max_time.split(":"))
            self.deadline = start_time + 3600 * hours + 60 * minutes + seconds

    def agreed(self) -> str | None:
        """Return the reason if all ranks know of a request: the signal's name, "time limit" or
        "another rank"; all ranks call this at every step."""
        mine = self.signal or ("time limit" if time.time() > self.deadline else None)
        return (mine or "another rank") if self._vote.agreed(mine is not None) else None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal."""
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number).name
            log.warning("%s: stopping after the current step", self.signal)

    def install(self) -> None:
        """Install the handlers."""
        for number in SIGNALS:
            signal.signal(number, self.on_signal)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle signals within the block, also between phases."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
