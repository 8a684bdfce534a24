"""Lightning's trainer, configured for our runs."""

from __future__ import annotations

import logging
import warnings

import lightning as L
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks, device_of, device_type
from trainer.training.lightning_internals import disable_sigterm_broadcast
from trainer.training.strategy import lightning_strategy


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
        # all
        # processes of a machine.
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
