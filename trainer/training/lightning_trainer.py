"""Lightning, configured for our runs: its trainer, strategies and batches.

All uses of Lightning's private interface are in the last section, so that a new version is checked
in one place.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import nn
from torch.utils.data import DataLoader

from trainer.config import RunConfig
from trainer.data.dataset import Batch, CountingSampler, TrainingSamples
from trainer.runs.ranks import Ranks, device_of, device_type


def make_trainer(
    config: RunConfig, ranks: Ranks, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Create Lightning's trainer without its own checkpoints, progress bar and tips."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    run, single = config.trainer, config.strategy.name == "single"
    strategy = lightning_strategy(config, ranks)
    if isinstance(strategy, ParallelStrategy):
        # Lightning takes the entry at the local rank. Left to itself it expects to see the GPUs of
        # all processes of a machine.
        strategy.parallel_devices = [device_of(config, ranks)] * ranks.local_size
    trainer = L.Trainer(
        max_steps=run.max_steps,
        accelerator=device_type(config),
        devices=1,
        num_nodes=ranks.nodes,
        strategy=strategy,
        # explicit, so that Lightning does not detect a SLURM job
        plugins=[LightningEnvironment() if single else TorchElasticEnvironment()],
        precision="32-true",  # of the weights; the decoder chooses the compute dtype
        accumulate_grad_batches=run.accumulation(ranks.world_size),
        logger=loggers,
        log_every_n_steps=0,  # the Metrics callback logs, including values from log()
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=config.run_dir,
    )
    disable_sigterm_broadcast(trainer)
    return trainer


class Uncopied(Strategy):
    """Mixin that leaves weights and optimizer state in place at the end of training.

    Lightning would copy them to the host, for all ranks of a node simultaneously.
    """

    def teardown(self) -> None:
        """Tear down as Lightning does, without the copies; see :func:`releasing`."""
        self.model = self.lightning_module
        for part in (
            getattr(self, "cluster_environment", None),  # with several processes
            self.precision_plugin,
            self.accelerator,
            self.checkpoint_io,
        ):
            if part is not None:
                part.teardown()


class Single(Uncopied, SingleDeviceStrategy):
    """One process on one device."""


class Replicated(Uncopied, DDPStrategy):
    """DDP."""


class Sharded(Uncopied, ModelParallelStrategy):
    """FSDP2; the model is already distributed when Lightning sees it."""

    def setup_environment(self) -> None:
        """Join the process group without Lightning's mesh, whose groups nothing destroys."""
        join_process_group(self)

    def model_to_device(self) -> None:
        """Do nothing: offloaded parameters stay on the CPU."""


@contextmanager
def releasing(module: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Free the memory of training at the end of the block; the checkpoint has its contents.

    The trainer and all it refers to are a reference cycle, which would otherwise keep the memory
    until the next collection.
    """
    try:
        yield
    finally:
        for optimizer in strategy.optimizers:
            optimizer.state.clear()
        module.to("meta")


def lightning_strategy(config: RunConfig, ranks: Ranks) -> Strategy:
    """Create Lightning's strategy for the configured one."""
    if config.strategy.name == "single":
        return Single(device_of(config, ranks))
    if config.strategy.name == "ddp":
        return Replicated(gradient_as_bucket_view=True, broadcast_buffers=False)
    return Sharded(data_parallel_size=ranks.world_size, tensor_parallel_size=1)


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


# Lightning's private interface


def disable_sigterm_broadcast(trainer: L.Trainer) -> None:
    """Stop Lightning from broadcasting at every batch whether a rank got SIGTERM.

    The broadcast causes a host sync; the ``Stopping`` callback does the same without one.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


def set_steps_done(trainer: L.Trainer, steps: int) -> None:
    """Set the initial value of ``trainer.global_step``.

    Lightning's checkpoints would set it, but contain unsharded tensors and the state of loops over
    a loader. Here the loader starts at the right step.
    """
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    progress.total.ready = progress.total.completed = steps


def join_process_group(strategy: ModelParallelStrategy) -> None:
    """Do what Lightning's ``setup_environment`` does, but make no device mesh."""
    strategy._setup_distributed()
