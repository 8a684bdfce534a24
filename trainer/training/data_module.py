"""Training batches for Lightning, from any step and for any rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from trainer.data.dataset import Batch, CountingSampler, TrainingSamples
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks, device_type


class TrainingData(L.LightningDataModule):
    """Training batches in an order that is a pure function of (seed, step).

    There is no state to save: a resumed run reads on from its step. ``first`` gives the number of
    the first sample of a step.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        config: RunConfig,
        ranks: Ranks,
        start: int,
        first: Callable[[int], int],
    ) -> None:
        super().__init__()
        self.samples, self.config, self.ranks = samples, config, ranks
        self.start, self.first = start, first

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's micro-batches from step ``start`` to ``trainer.max_steps``."""
        run, workers = self.config.trainer, self.config.data.num_workers
        sampler = CountingSampler(
            steps=run.max_steps,
            batch_size=run.batch_size,
            start=self.start,
            micro_batches=run.accumulation(self.ranks.world_size),
            rank=self.ranks.rank,
            ranks=self.ranks.world_size,
            first=self.first,
        )
        return DataLoader(
            self.samples,
            batch_sampler=sampler,
            collate_fn=_as_is,
            num_workers=workers,
            pin_memory=device_type(self.config) == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_ignore_signals,
            # The default generator's state is restored on resume: do not draw from it here.
            generator=torch.Generator(),
        )


def _as_is(batch: Any) -> Any:
    """Return the batch unchanged: the dataset makes whole batches."""
    return batch


def _ignore_signals(_: int) -> None:
    """Ignore signals sent to every process of a job: only the trainer knows when to stop."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
