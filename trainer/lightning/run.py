"""The callback of a run: it restores, changes, measures, saves and stops."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

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
from trainer.common.ranks import any_rank, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, held_out_windows
from trainer.lightning.benchmarks import Benchmarks
from trainer.lightning.drop import apply_change, losses_of
from trainer.lightning.metrics import Metrics, epochs_read
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.setup import make_callbacks, peak_of_ranks
from trainer.runs.phases import (
    Phase,
    kept_steps,
    layout_of_phase,
    phase_before,
    phases_of,
)

log = logging.getLogger(__name__)

MOST_SKIPPED = 32
"""Updates skipped in a row after which a run ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


class RunCallback(L.Callback):
    """Restores, changes, measures, saves and stops a run; lives through its phases.

    It follows the user's callbacks.

    ``phase``: the present phase. ``step``: updates done before it. ``effects``: losses before and
    after the change of each phase, by its name.

    Args:
        config: the run.
        corpus: its text.
        checkpoint, state: where it begins, as ``starting_point`` returns them.
        progress: the bar.
        asked: returns why this process is asked to stop, or None.
        is_control: see :func:`~trainer.lightning.fit.train`.
    """

    phase: Phase

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        checkpoint: Path | None,
        state: dict[str, Any],
        progress: Progress,
        asked: Callable[[], str | None],
        is_control: bool,
    ) -> None:
        self.config, self.corpus, self.ranks = config, corpus, current_ranks()
        self.asked, self.is_control = asked, is_control
        self.checkpoints = Path(config.run_dir) / "checkpoints"
        self.begin_from, self.state, self.step = checkpoint, state, state["step"]
        self.phases, self.permanent = phases_of(config), kept_steps(config)
        self.effects: dict[str, dict[str, Any]] = dict(state.get("effects", {}))
        self.metrics = Metrics(
            Path(config.run_dir) / "metrics.csv",
            self.phases,
            epochs_read(corpus, self.phases),
            progress,
            peak_of_ranks(config),
        )
        self.metrics.pending |= state.get("pending_metrics", {})
        self.benchmarks = Benchmarks(config, corpus, self.ranks)
        self.benchmarks.milestones += state.get("benchmarks", ())
        self.user_callbacks = make_callbacks(config.callbacks)
        keep = config.trainer.keep_checkpoints, config.trainer.keep_every
        self.writer = Writer(self.checkpoints, *keep, self.permanent)
        self.saved_at = time.monotonic()

    # The start of a phase

    def on_fit_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Restore the checkpoint, and change the model, before other callbacks' training starts."""
        if self.begin_from is not None:
            restore(module.model, trainer.optimizers[0], self.begin_from)
            module.tally.load(self.state["tally"], module.device)
            for callback in self.user_callbacks:
                if callback.state_key in self.state["user_callbacks"]:
                    callback.load_state_dict(self.state["user_callbacks"][callback.state_key])
            self.begin_from = None
        # Lightning has no public way to begin at a step without a checkpoint of its own.
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.step
        if self.step == 0 and self.config.model.is_trained and not self.benchmarks.milestones:
            self.measure_benchmarks(module, 0)
        longer = self.phase.config.data.sequence_length > module.model.layout.training_length
        # A resumed run repeats no change: the layout is in the checkpoint.
        begins = self.phase.start == self.step and self.phase.name not in self.effects
        if begins and (self.phase.change or longer):
            self.change(trainer, module)

    def change(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Change the model for its phase, and measure the held-out loss before and after."""
        phase, drop = self.phase, self.phase.settings.drop
        if drop and not self.has_dropped:
            self.save(trainer, module, BEFORE_DROP)
        norms_come_on = module.model.config.qk_norm.when == "after_drop"
        before, after = apply_change(
            trainer,
            module.model,
            layout_of_phase(module.model.layout, phase),
            gain=drop.qk_norm_gain if drop and norms_come_on else "one",
            optimizer_state=phase.settings.optimizer_state,
            probe=effect_probe(self.corpus, phase),
            rows=self.micro_batch_size,
        )
        losses = {"loss_before": fmean(before), "loss_after": fmean(after)}
        self.effects[phase.name] = {
            "step": self.step,
            "what": phase.description,
            "length": phase.config.data.sequence_length,
            **losses,
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        self.metrics.pending |= {f"{phase.key}/{name}": loss for name, loss in losses.items()}
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            *(self.step, phase.description, *losses.values()),
        )
        self.measure_benchmarks(module, self.step)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock."""
        self.metrics.start(trainer.global_step)

    # The end of a step

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        """Measure, write a row, save and stop, in this order, after a step's last micro-batch."""
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        phase, step, settings = self.phase, trainer.global_step, self.config.trainer
        is_last = step == phase.end
        if is_last and phase.name in self.effects:
            self.measure_effect(module)
        if is_last or step % (self.config.benchmarks.every or step + 1) == 0:
            self.measure_benchmarks(module, step)
        if is_last or step % settings.log_every == 0:
            self.write_row(trainer, module, batch)
        reason, age = self.asked(), time.monotonic() - self.saved_at
        is_late = age > 60 * (settings.checkpoint_minutes or math.inf)
        # Clocks of ranks differ, and signals: all save and stop after the same step.
        is_late, stops = any_rank(is_late, reason is not None and step < settings.max_steps)
        is_due = is_late or step % settings.checkpoint_every == 0
        # While updates are skipped, nothing is saved by schedule: the newest checkpoint is healthy.
        saves = is_last or stops or step in self.permanent
        if saves or (is_due and not module.tally.skipped_in_a_row()):
            self.save(trainer, module, step_name(step))
        if is_last or stops:
            self.writer.wait()
        if stops:
            reason = reason or "another rank"
            text = f"Stopped after step {step} ({reason}), checkpoint saved."
            raise PreemptedError(text, reason)

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.settings.drop and phase.name in self.effects for phase in self.phases)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a forward pass on this rank."""
        run = self.phase.config.trainer
        return run.micro_batch_size or run.batch_size // self.ranks.world_size

    def measure_effect(self, module: LanguageModule) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        phase, effect = self.phase, self.effects[self.phase.name]
        with self.metrics.elsewhere():
            probe = effect_probe(self.corpus, phase)
            losses = losses_of(module.model, probe, self.micro_batch_size)
        sequences = effect["sequences"] | {"end": losses}
        self.effects[phase.name] = effect | {"loss_end": fmean(losses), "sequences": sequences}
        self.metrics.pending[f"{phase.key}/loss_end"] = fmean(losses)
        name = "recalibration" if phase.settings.drop else f"phase {phase.name!r}"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, fmean(losses), name)

    def measure_benchmarks(self, module: LanguageModule, step: int) -> None:
        """Measure the benchmarks after ``step`` updates."""
        if self.config.benchmarks.every is None:
            return
        tokens = phase_before(self.phases, step).tokens_at(step)
        with self.metrics.elsewhere():
            scores = self.benchmarks.measure(module.model, step, tokens, self.has_dropped)
        self.metrics.pending |= scores

    def write_row(self, trainer: L.Trainer, module: LanguageModule, batch: Batch) -> None:
        """Write a row of metrics; a run that diverged ends with it."""
        self.metrics.write(trainer, module, self.phase, batch)
        if not self.is_control:
            in_a_row = module.tally.skipped_in_a_row()
            check_divergence(in_a_row, trainer.global_step, self.checkpoints)

    def save(self, trainer: L.Trainer, module: LanguageModule, name: str) -> None:
        """Write a checkpoint of the present state beside training; all ranks call this together."""
        step, corpus = trainer.global_step, self.corpus
        with self.metrics.elsewhere():
            state = {
                "step": step,
                "model": asdict(module.model.config),
                "layout": module.model.layout.to_dict(),
                "tokenizer": corpus.tokenizer.to_str(),
                "end_of_text": corpus.end_of_text,
                "token_files": self.state.get("token_files", {}),
                "config": asdict(self.config),
                "texts": corpus.fingerprints,
                "tally": module.tally.state(),
                "pending_metrics": dict(self.metrics.pending),
                "effects": dict(self.effects),
                "benchmarks": [*self.benchmarks.milestones],
                "user_callbacks": {c.state_key: c.state_dict() for c in self.user_callbacks},
            }
            self.writer.save(name, module.model, trainer.optimizers[0], state)
        self.saved_at = time.monotonic()


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
