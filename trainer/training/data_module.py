"""Training batches for Lightning, from any step on."""

from __future__ import annotations

import lightning as L
from torch.utils.data import DataLoader

from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, CountingSampler, TrainingSamples
from trainer.training.config import RunConfig


class TrainingData(L.LightningDataModule):
    """Sample order is a pure function of (seed, counter), and the counter of the step; so there is
    nothing to save, and resuming reads on where the run stopped."""

    def __init__(self, corpus: Corpus, config: RunConfig) -> None:
        super().__init__()
        self.corpus, self.config = corpus, config

    def train_dataloader(self) -> DataLoader[Batch]:
        """Micro-batches from the trainer's current step to the end of the run."""
        assert self.trainer is not None
        run = self.config.trainer
        sampler = CountingSampler(
            total=run.max_steps * run.accumulation,
            batch_size=run.batch_size // run.accumulation,
            start=self.trainer.global_step * run.accumulation,
        )
        return DataLoader(
            TrainingSamples(self.corpus, self.config.data, self.config.seed),
            batch_sampler=sampler,
            collate_fn=_as_is,
            num_workers=self.config.data.num_workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
            persistent_workers=self.config.data.num_workers > 0,
        )


def _as_is(batch: Batch) -> Batch:
    """The dataset makes whole batches; there is nothing to collate."""
    return batch
