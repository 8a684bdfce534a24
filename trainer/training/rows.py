"""Rows of ``metrics.csv`` and of dashboards: what a run shows of its updates."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from trainer.common.processes import current_ranks
from trainer.common.progress import Progress
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.optimizers import global_norm
from trainer.model.decoder import Decoder
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.directory import COLUMNS, append_metrics
from trainer.runs.phases import Phase, Phases, Run
from trainer.training.setup import precision_of


class Rows:
    """Writes a row of metrics after an update, with the speed of training since the last row.

    ``count``: number of rows that there are.
    """

    def __init__(self, run: Run, corpus: Corpus, progress: Progress, count: int) -> None:
        self.run = run
        self.progress = progress
        self.count = count
        self.epochs = epochs_read(corpus, run.phases)
        self.last_step = 0
        self.last_time = 0.0
        """Time of the last row, later by what was spent outside of training since."""

    def start(self, step: int) -> None:
        """Begin to count time and tokens after ``step`` updates."""
        self.last_step = step
        self.last_time = time.perf_counter()
        self.progress.advance_to(self.run.phases.at(step).tokens_at(step))

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of training; causes a host sync."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the updates before take their time of training
        start = time.perf_counter()
        yield
        self.last_time += time.perf_counter() - start

    def write(
        self,
        trainer: L.Trainer,
        module: LanguageModule,
        phase: Phase,
        batch: Batch,
        pending: dict[str, float],
    ) -> None:
        """Write values of this update, logged ones of callbacks and ``pending`` measurements."""
        step = trainer.global_step
        metrics: dict[str, float] = {"tokens": phase.tokens_at(step)}
        for name, times in self.epochs(step).items():
            metrics[f"epochs/{name}"] = round(times, 6)
        metrics["phase"] = self.run.phases.index(phase)
        metrics |= module.tally.read()
        metrics["parameter_norm"] = global_norm(p.detach() for p in module.parameters()).item()
        metrics["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        metrics |= self.lap(module, phase, step, batch)
        for name, value in trainer.logged_metrics.items():
            key = f"callback/{name}" if name in COLUMNS else name  # which is the run's own
            metrics[key] = float(value)
        metrics |= pending
        rank_zero_only(append_metrics)(self.run.directory / "metrics.csv", metrics | {"step": step})
        self.count += 1
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.progress.advance_to(phase.tokens_at(step), loss=metrics["loss"])

    def lap(
        self, module: LanguageModule, phase: Phase, step: int, batch: Batch
    ) -> dict[str, float]:
        """Begin the next row, and return tokens per second since the last; on a GPU also peak
        memory in GiB, and the share of the dense peak of all ranks' GPUs if it is known."""
        now = time.perf_counter()
        tokens = (step - self.last_step) * phase.tokens_per_step
        rate = tokens / (now - self.last_time)
        self.last_step = step
        self.last_time = now
        speed = {"tokens_per_second": round(rate, 1)}
        if module.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated() / 2**30
            peak = dense_peak(torch.cuda.get_device_name(), precision_of(self.run.config.trainer))
            if peak is not None:
                flops = flops_per_token(module.model, batch)
                speed["mfu"] = rate * flops / (peak * current_ranks().world_size)
        return speed


def epochs_read(corpus: Corpus, phases: Phases) -> Callable[[int], dict[str, float]]:
    """Return a function from step to the number of times each text has been read."""
    samples = [TrainingSamples(corpus.mixed(p.data), p.data, p.seed) for p in phases]

    def read(step: int) -> dict[str, float]:
        total = {part.name: 0.0 for part in corpus.parts}
        for phase, of_phase in zip(phases, samples, strict=True):
            steps = max(min(step, phase.end) - phase.start, 0)
            for name, times in of_phase.epochs(steps * phase.batch_size).items():
                total[name] += times
        return total

    return read


def flops_per_token(model: Decoder, batch: Batch) -> float:
    """Return the operations of a training step per token; document masks are those of ``batch``."""
    rows, length = batch["input_ids"].shape
    if "documents" not in batch:
        return training_flops(model.config, model.layout, length) / length
    total = 0.0
    for row in batch["documents"]:
        lengths = row.unique_consecutive(return_counts=True)[1].tolist()
        total += training_flops(model.config, model.layout, length, lengths)
    return total / (rows * length)
