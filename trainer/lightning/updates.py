"""Counting the updates of a Lightning trainer: numbers of them, and shares of all."""

import math

import lightning as L

from trainer.common.updates import is_share


def updates_done(trainer: L.Trainer) -> int:
    """Return the number of updates so far; Lightning counts the steps of all optimizers."""
    return trainer.global_step // max(len(trainer.optimizers), 1)


def total_updates(trainer: L.Trainer) -> float:
    """Return the number of updates in the whole training; inf if nothing limits it.

    With manual optimization a batch may have any number of updates: their mean until now counts.
    """
    if trainer.lightning_module.automatic_optimization:
        total = trainer.estimated_stepping_batches
        return total if total > 0 else math.inf
    done = updates_done(trainer)
    batches = max(trainer.fit_loop.total_batch_idx, 1)
    updates_per_batch = done / batches if done > 0 else 1.0
    all_batches = trainer.num_training_batches * (trainer.max_epochs or 0)
    most_updates = trainer.max_steps / max(len(trainer.optimizers), 1)
    limits = [most_updates, all_batches * updates_per_batch]
    return min((limit for limit in limits if limit > 0), default=math.inf)  # -1: no limit


def in_updates(number: int | float, trainer: L.Trainer) -> int:
    """Return a number of updates, or a share of all, as a number of updates."""
    if not is_share(number):
        return int(number)
    updates = number * total_updates(trainer)
    if trainer.lightning_module.automatic_optimization:
        return round(updates)
    return math.ceil(updates - 1e-6)  # the mean falls between two updates
