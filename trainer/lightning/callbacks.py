"""Callbacks of a run: metrics, checkpoints, stopping.

They live through all phases of a run. Those with state give it to ``state.json``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch

from trainer.checkpoint import BEFORE_DROP, Writer, regular_checkpoints, step_name, step_of
from trainer.common.errors import DivergedError, PreemptedError
from trainer.common.progress import Progress
from trainer.common.ranks import Vote
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.optimizers import global_norm
from trainer.model.decoder import Decoder
from trainer.model.flops import training_flops
from trainer.runs.metrics_file import COLUMNS
from trainer.runs.phases import Phase, phase_before

log = logging.getLogger(__name__)


class StepCallback(L.Callback):
    """Callback of steps, each of one or several micro-batches."""

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Act before a step's first micro-batch."""

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Act after a step's last micro-batch; ``trainer.global_step`` counts the step."""

    def on_train_batch_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Begin a step if the micro-batch is its first one."""
        if index % trainer.accumulate_grad_batches == 0:
            self.begin_step(trainer, module)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """End a step if the micro-batch is its last one."""
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            self.end_step(trainer, module)


def is_due(trainer: L.Trainer, every: int) -> bool:
    """Whether a step is one of every so many, or the last of its phase."""
    return trainer.global_step % every == 0 or trainer.global_step == trainer.max_steps


class Metrics(L.Callback):
    """Writes a row to all loggers every ``log_every`` steps, and advances the progress bar.

    Sums over steps stay on the device, in the module's tally, so that there is no host sync between
    two rows. The row also contains what callbacks passed to ``module.log`` or :meth:`add`. A run
    that has skipped :data:`MOST_SKIPPED` updates in a row ends with the row.

    Args:
        phases: of the run.
        epochs: maps a number of steps to how often each text has been read.
        progress: the bar.
        checkpoints: their directory, which the error of a diverged run names; None: go on.
        peak: dense operations per second of all ranks' GPUs; None if unknown.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        epochs: Callable[[int], dict[str, float]],
        progress: Progress,
        checkpoints: Path | None,
        peak: float | None = None,
    ) -> None:
        self.phases, self.epochs, self.progress, self.peak = phases, epochs, progress, peak
        self.checkpoints = checkpoints
        self.pending: dict[str, float] = {}
        self._last_time, self._last_step, self._elsewhere = 0.0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the values for the next row."""
        return {"pending_metrics": dict(self.pending)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.pending = dict(state_dict["pending_metrics"])

    def add(self, metrics: dict[str, float]) -> None:
        """Add ``metrics`` to the next row."""
        self.pending |= metrics

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._elsewhere += time.perf_counter() - start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._last_time, self._last_step = time.perf_counter(), trainer.global_step
        self._elsewhere = 0.0  # what came before
        self.progress.advance_to(trainer.global_step)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        """Write a row that is due, after a step's last micro-batch."""
        step = trainer.global_step
        phase = phase_before(self.phases, step)
        is_whole = (index + 1) % trainer.accumulate_grad_batches == 0
        if not is_whole or not is_due(trainer, phase.config.trainer.log_every):
            return
        metrics = {
            "tokens": phase.tokens_at(step),
            **{f"epochs/{k}": round(v, 6) for k, v in self.epochs(step).items()},
            "phase": self.phases.index(phase),
            **module.tally.read(),
            "parameter_norm": global_norm(p.detach() for p in module.model.parameters()).item(),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            **self._speed(module, phase, step, batch),
            # A user's callback may log under a name of the run.
            **{
                f"callback/{name}" if name in COLUMNS else name: float(value)
                for name, value in trainer.logged_metrics.items()
            },
            **self.pending,
        }
        self.pending = {}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.progress.advance_to(step, loss=metrics["loss"])
        if self.checkpoints is not None:
            check_divergence(module.tally.skipped_in_a_row(), step, self.checkpoints)

    def _speed(
        self, module: LanguageModule, phase: Phase, step: int, batch: Batch
    ) -> dict[str, float]:
        now = time.perf_counter()
        tokens = (step - self._last_step) * phase.config.tokens_per_step
        rate = tokens / (now - self._last_time - self._elsewhere)
        self._last_time, self._last_step, self._elsewhere = now, step, 0.0
        speed = {"tokens_per_second": round(rate, 1)}
        if module.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated() / 2**30
            if self.peak is not None:
                speed["mfu"] = rate * flops_per_token(module.model, batch) / self.peak
        return speed


def flops_per_token(model: Decoder, batch: Batch) -> float:
    """Return the operations of a training step per token; document masks are those of ``batch``."""
    rows, length = batch["input_ids"].shape
    if "documents" not in batch:
        return training_flops(model.config, model.layout, length) / length
    counts = [row.unique_consecutive(return_counts=True)[1].tolist() for row in batch["documents"]]
    total = sum(training_flops(model.config, model.layout, length, each) for each in counts)
    return total / (rows * length)


class Saving(StepCallback):
    """Saves a checkpoint every so many steps, by time, and at the end of a phase.

    Nothing is saved by schedule while updates are being skipped: the newest checkpoint is healthy.

    Args:
        writer: writes beside training.
        every: steps between checkpoints.
        minutes: minutes after a checkpoint until the next; None: by steps only.
        permanent: other steps to save.
        state: returns the contents of ``state.json``; all ranks call it together.
        metrics: leaves the time of saving out of the speed.
    """

    def __init__(
        self,
        writer: Writer,
        every: int,
        minutes: float | None,
        permanent: frozenset[int],
        state: Callable[[L.Trainer], dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        self.writer, self.every, self.permanent = writer, every, permanent
        self.seconds = math.inf if minutes is None else 60 * minutes
        self.state, self.metrics = state, metrics
        self._vote, self._saved_at, self._last_saved = Vote(), time.monotonic(), 0

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save a step that is due."""
        step = trainer.global_step
        # Clocks of ranks differ: all save after the step at which they know of the first.
        by_time = self.seconds < math.inf and self._vote.agreed(
            time.monotonic() - self._saved_at > self.seconds
        )
        if step == trainer.max_steps:
            self.save_now(trainer)
            return
        is_scheduled = by_time or step % self.every == 0
        if step in self.permanent or (is_scheduled and not module.tally.skipped_in_a_row()):
            self.save(trainer, step_name(step))

    def before_drop(self, trainer: L.Trainer) -> None:
        """Save the state that the drop is about to change."""
        self.save(trainer, BEFORE_DROP)

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Copy the present state and let the writer's thread write it."""
        module: Any = trainer.lightning_module
        with self.metrics.elsewhere():
            state = self.state(trainer)
            self.writer.save(name, module.model, trainer.optimizers[0], state)
        self._saved_at, self._last_saved = time.monotonic(), trainer.global_step
        self._vote = Vote()  # votes of this step asked for this checkpoint

    def save_now(self, trainer: L.Trainer) -> None:
        """Save this step, if it is not yet saved, and wait for the file system."""
        if self._last_saved != trainer.global_step:
            self.save(trainer, step_name(trainer.global_step))
        self.writer.wait()


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
MARGIN = 120.0
"""Seconds before the end of a SLURM job at which its run stops by itself, or more where its steps
and checkpoints take long."""


class Stopping(StepCallback):
    """Stops the run at a step boundary, with a checkpoint, on a signal or a time limit.

    SLURM announces preemption with SIGTERM, and the end of a job with the signal of ``--signal``.
    All ranks agree without a host sync and stop after the same step. A second Ctrl-C ends the
    process immediately.

    Args:
        saving: saves the last step.
        last_step: of the whole run, after which nothing stops.
        deadline: seconds since the epoch at which to stop; None: before the end of a SLURM job.
    """

    def __init__(self, saving: Saving, last_step: int, deadline: float | None) -> None:
        self.saving, self.last_step, self.deadline = saving, last_step, deadline
        self.request: str | None = None
        self._vote = Vote()
        self._step_ends: deque[float] = deque(maxlen=20)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal."""
        if self.request is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.request is None:
            self.request = signal.Signals(number).name
            log.warning("%s: stopping after the current step", self.request)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block, also between phases."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.on_train_start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_train_start(self, *_: Any) -> None:
        """Install the handlers: Lightning's own would act in the middle of a step."""
        for number in SIGNALS:
            signal.signal(number, self.on_signal)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Save and stop after the step at which all ranks know of the request."""
        if trainer.global_step == self.last_step:
            return
        self._step_ends.append(time.time())
        if self.request is None and time.time() > self._limit():
            self.request = "time limit"
        if not self._vote.agreed(self.request is not None):
            return
        reason = self.request or "another rank"
        self.saving.save_now(trainer)
        raise PreemptedError(
            f"Stopped after step {trainer.global_step} ({reason}), checkpoint saved.",
            requeues=reason != "SIGTERM",
        )

    def _limit(self) -> float:
        limit = math.inf if self.deadline is None else self.deadline
        if end := os.environ.get("SLURM_JOB_END_TIME"):
            step = max((b - a for a, b in pairwise(self._step_ends)), default=0.0)
            # Disks are slow when all jobs of a cluster end.
            margin = max(MARGIN, 1.5 * (2 * step + self.saving.writer.seconds))
            limit = min(limit, float(end) - margin)
        return limit
