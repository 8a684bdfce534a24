"""All uses of Lightning's private interface, so that a new version is checked in one place."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy


def disable_sigterm_broadcast(trainer: L.Trainer) -> None:
    """Stop Lightning from broadcasting at every batch whether a rank got SIGTERM.

    The broadcast causes a host sync; the ``Preemption`` callback does the same without one.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


def set_steps_done(trainer: L.Trainer, steps: int) -> None:
    """Set the initial value of ``trainer.global_step``.

    Lightning's own checkpoints would do so, but contain unsharded tensors and the state of loops
    over a loader. Here the loader starts at the right step.
    """
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    progress.total.ready = progress.total.completed = steps


def join_process_group(strategy: ModelParallelStrategy) -> None:
    """Do what Lightning's ``setup_environment`` does, but make no device mesh."""
    strategy._setup_distributed()
