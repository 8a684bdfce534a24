"""Metrics every ``log_every`` steps; between two rows there is no host sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.common.errors import os_reason
from trainer.common.progress import Progress
from trainer.config import RunConfig
from trainer.data.dataset import Batch
from trainer.model.decoder import Decoder
from trainer.model.flops import training_flops
from trainer.runs.metrics_file import COLUMNS, read_metrics, write_metrics
from trainer.runs.phases import phase_before
from trainer.runs.ranks import all_gather
from trainer.runs.saved_state import RunState
from trainer.training.devices import dense_peak
from trainer.training.module import LanguageModule, ends_step
from trainer.training.optimizers import global_norm

log = logging.getLogger(__name__)

SLOW = 10.0
"""Seconds after a row of metrics from which every step advances the progress bar."""

Epochs = Callable[[int], dict[str, float]]
"""Maps a number of steps to the number of times that each text has been read."""


class Metrics(L.Callback):
    """Writes a row to all loggers, and advances the progress bar.

    The row also contains what the user's callbacks passed to ``module.log``. Sums over steps stay
    on the device, in the module's tally; ``pending`` holds other values for the next row.
    """

    def __init__(self, config: RunConfig, progress: Progress, epochs: Epochs) -> None:
        self.config, self.progress, self.epochs = config, progress, epochs
        self.peak: float | None = None
        """Operations per second of all ranks' GPUs, or None if one is unknown."""
        self.pending: dict[str, float] = {}
        self.last_loss: float | None = None
        self.last_time, self.last_step = 0.0, 0

    def on_train_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Start the clocks, and add up the peaks of all ranks' GPUs."""
        if module.device.type == "cuda":
            products = self.config.trainer.products
            peaks = all_gather(dense_peak(torch.cuda.get_device_name(), products))
            self.peak = None if None in peaks else sum(filter(None, peaks))
        self.last_time, self.last_step = time.perf_counter(), trainer.global_step
        module.timer.enter("data")
        if self.pending and module.ranks.is_rank_zero:
            self._amend_row(trainer)
        self.progress.advance_to(trainer.global_step)
        steps = f"{trainer.global_step + 1:,} of {self.config.trainer.max_steps:,}"
        log.info("%s: step %s", self.progress.title, steps)

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Log every ``log_every``-th step, after its last micro-batch."""
        module.timer.enter("data")
        step = trainer.global_step
        last = step == self.config.trainer.max_steps
        due = step % self.config.trainer.log_every == 0 or last
        if not ends_step(trainer, index):
            return
        if not due:
            if time.perf_counter() - self.last_time > SLOW:
                self.progress.advance_to(step, loss=self.last_loss)
            return
        phase = phase_before(module.phases, step)
        norm = global_norm(p.detach() for p in module.model.parameters())
        metrics = {
            "tokens": phase.tokens_at(step),
            **{f"epochs/{k}": round(v, 6) for k, v in self.epochs(step).items()},
            "phase": module.phases.index(phase),
            **module.tally.read(),
            "parameter_norm": norm.item(),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            **self._speed(module, step, batch),
            # A user's callback may log under a name of the run.
            **{
                f"callback/{name}" if name in COLUMNS else name: float(value)
                for name, value in trainer.logged_metrics.items()
            },
            **self.pending,
        }
        self.pending, self.last_loss = {}, metrics["loss"]
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.progress.advance_to(step, loss=metrics["loss"])

    def _amend_row(self, trainer: L.Trainer) -> None:
        """Add what was measured on resuming to the row of this step, if that is written.

        Keep it for the next row if the disk is full, which stops no run.
        """
        path, step = Path(self.config.run_dir) / "metrics.csv", trainer.global_step
        *others, last = read_metrics(path) or [{}]
        if last.get("step") != step:
            return
        try:
            write_metrics(path, [*others, last | self.pending])
        except OSError as error:
            log.warning("%s: %s; the run goes on", path.name, os_reason(error))
            return
        for logger in trainer.loggers[1:]:
            logger.log_metrics(self.pending, step=step)
        self.pending = {}

    def _speed(self, module: LanguageModule, step: int, batch: Batch) -> dict[str, float]:
        times = module.timer.read()
        now, steps = time.perf_counter(), step - self.last_step
        # Speed excludes monitors, whose frequency is the user's choice.
        rate = steps * self.config.tokens_per_step / (now - self.last_time - times["monitor"])
        self.last_time, self.last_step = now, step
        speed = {"tokens_per_second": round(rate, 1)}
        speed |= {f"time/{k}": round(v / steps, 6) for k, v in times.items()}
        if module.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated() / 2**30
            if self.peak is not None:
                speed["mfu"] = rate * flops_per_token(module.model, batch) / self.peak
        return speed

    def add(self, metrics: dict[str, float]) -> None:
        """Add ``metrics`` to the next row."""
        self.pending |= metrics

    def restore(self, state: RunState) -> None:
        """Restore the values not logged yet."""
        self.pending, self.last_loss = dict(state.pending_metrics), state.loss


def flops_per_token(model: Decoder, batch: Batch) -> float:
    """Return the operations of a training step per token; document masks are those of ``batch``."""
    rows, length = batch["input_ids"].shape
    if "documents" not in batch:
        return training_flops(model.config, model.layout, length) / length
    counts = [row.unique_consecutive(return_counts=True)[1].tolist() for row in batch["documents"]]
    total = sum(training_flops(model.config, model.layout, length, each) for each in counts)
    return total / (rows * length)
