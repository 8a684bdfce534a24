"""Rows of metrics for ``metrics.csv``, Weights & Biases and TensorBoard."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.common.files import write_atomically
from trainer.common.progress import Progress
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.optimizers import global_norm
from trainer.model.decoder import Decoder
from trainer.model.flops import training_flops
from trainer.runs.directory import COLUMNS, append_metrics, read_metrics
from trainer.runs.phases import Phase

LENGTH = "evaluation/length"
"""Name of the length in tokens in dashboards, against which scores are drawn."""


class Metrics:
    """Writes rows to ``metrics.csv`` and all loggers, and advances the progress bar.

    Sums over steps stay on the device, in the module's tally, so that there is no host sync between
    two rows.

    ``pending``: more values of the next row.

    Args:
        path: the file.
        phases: of the run.
        epochs: maps a number of steps to how often each text has been read.
        progress: the bar.
        peak: dense operations per second of all ranks' GPUs; None if unknown.
    """

    def __init__(
        self,
        path: Path,
        phases: Sequence[Phase],
        epochs: Callable[[int], dict[str, float]],
        progress: Progress,
        peak: float | None = None,
    ) -> None:
        self.path, self.phases, self.epochs = path, phases, epochs
        self.progress, self.peak = progress, peak
        self.pending: dict[str, float] = {}
        self._last_time, self._last_step = 0.0, 0

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last_time += time.perf_counter() - start

    def start(self, step: int) -> None:
        """Start the clock of a phase."""
        self._last_time, self._last_step = time.perf_counter(), step
        self.progress.advance_to(step)

    def write(self, trainer: L.Trainer, module: LanguageModule, phase: Phase, batch: Batch) -> None:
        """Write a row, with what callbacks passed to ``module.log``."""
        step = trainer.global_step
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
        rank_zero_only(append_metrics)(self.path, metrics | {"step": step})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.progress.advance_to(step, loss=metrics["loss"])

    def _speed(
        self, module: LanguageModule, phase: Phase, step: int, batch: Batch
    ) -> dict[str, float]:
        now = time.perf_counter()
        tokens = (step - self._last_step) * phase.config.tokens_per_step
        rate = tokens / (now - self._last_time)
        self._last_time, self._last_step = now, step
        speed = {"tokens_per_second": round(rate, 1)}
        if module.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated() / 2**30
            if self.peak is not None:
                speed["mfu"] = rate * flops_per_token(module.model, batch) / self.peak
        return speed


def epochs_read(corpus: Corpus, phases: Sequence[Phase]) -> Callable[[int], dict[str, float]]:
    """Return a function from step to the number of times each text has been read."""
    samples = [
        TrainingSamples(corpus.mixed(phase.config.data), phase.config.data, phase.seed)
        for phase in phases
    ]

    def read(step: int) -> dict[str, float]:
        total = {part.name: 0.0 for part in corpus.parts}
        for phase, of_phase in zip(phases, samples, strict=True):
            until = phase.first_sample(max(phase.start, min(step, phase.end)))
            before = of_phase.epochs(phase.samples)
            for name, times in of_phase.epochs(until).items():
                total[name] += times - before[name]
        return total

    return read


def flops_per_token(model: Decoder, batch: Batch) -> float:
    """Return the operations of a training step per token; document masks are those of ``batch``."""
    rows, length = batch["input_ids"].shape
    if "documents" not in batch:
        return training_flops(model.config, model.layout, length) / length
    counts = [row.unique_consecutive(return_counts=True)[1].tolist() for row in batch["documents"]]
    total = sum(training_flops(model.config, model.layout, length, each) for each in counts)
    return total / (rows * length)


def dashboards(config: RunConfig) -> list[Logger]:
    """Return the configured loggers besides ``metrics.csv``."""
    loggers, place = [], Path(config.run_dir)
    if config.logger.wandb:
        is_control = place.parent.name == "controls"
        name = f"{config.name}/{place.name}" if is_control else config.name
        loggers.append(_wandb(place, name, config.name, config.logger.offline))
    if config.logger.tensorboard:
        from lightning.pytorch.loggers import TensorBoardLogger

        loggers.append(TensorBoardLogger(place, name="tensorboard", version=""))
    return loggers


@lru_cache
def _wandb(place: Path, name: str, group: str, offline: bool) -> Logger:
    """Create a run's logger once: it stays open for results that are computed after training.

    Offline it begins with the rows of earlier processes: each process writes a directory of its own
    under the run's id, and `wandb sync` of the newest uploads the whole series.
    """
    from lightning.pytorch.loggers import WandbLogger

    path = place / "wandb_id"
    if not path.exists():
        rank_zero_only(write_atomically)(path, secrets.token_hex(4))
    logger = WandbLogger(
        name=name,
        group=group,
        project=os.environ.get("WANDB_PROJECT", "unrope"),
        id=path.read_text() if path.exists() else None,
        # Offline there is nothing to resume, and some versions warn of it.
        resume=None if offline else "allow",
        mode="offline" if offline else None,
        save_dir=place,
        reinit="create_new",  # the run's own stays open while its controls train
    )
    logger._wandb_init.pop("anonymous", None)  # wandb warns about it, whatever its value
    for row in read_metrics(place / "metrics.csv") if offline else ():
        logger.log_metrics(row, step=row.pop("step"))
    return logger


def log_results(
    config: RunConfig, values: Mapping[int, Mapping[str, float]], images: Mapping[str, Path]
) -> None:
    """Log an evaluation's ``values``, by length in tokens and name, to the dashboards.

    Weights & Biases also gets ``images`` (PNG files).
    """
    for logger in dashboards(config):
        dashboard: Any = logger
        is_wandb = type(logger).__name__ == "WandbLogger"
        for length, row in values.items():
            for name in row if is_wandb else ():
                # by its name: Lightning's `*` takes precedence over `evaluation/*`
                dashboard.experiment.define_metric(name, step_metric=LENGTH)
            dashboard.log_metrics({LENGTH: length, **row}, step=None if is_wandb else length)
        for name, path in images.items() if is_wandb else ():
            dashboard.log_image(f"length/{name}", [str(path)])
        logger.finalize("success")
