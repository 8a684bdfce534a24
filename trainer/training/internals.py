"""Names of Lightning that it does not document; each has a test that fails when it goes."""

from typing import Any

import lightning as L


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Keep Lightning from handling signals.

    It would stop within a step, and cause a host sync at every batch to share SIGTERM.
    """
    signals: Any = trainer._signal_connector
    signals.register_signal_handlers = lambda: None
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


def loops_at(
    trainer: L.Trainer, *, epoch: int, batches: int, batches_before: int, step: int
) -> dict[str, Any]:
    """Return what Lightning's checkpoints hold of its loops after ``step`` updates.

    ``epoch``, ``batches_before``: epochs that are done, and their batches. ``batches``: those of
    the present epoch that are done; 0: it has not begun.
    """
    state = trainer.fit_loop.state_dict()
    begun = epoch + 1 if batches else epoch
    for count in state["epoch_progress"].values():
        count |= {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    batch = state["epoch_loop.batch_progress"]
    batch["current"] |= dict.fromkeys(batch["current"], batches)
    batch["total"] |= dict.fromkeys(batch["total"], batches_before + batches)
    updates = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    updates["total"] |= {"ready": step, "completed": step}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return {"fit_loop": state}


def join_without_mesh(strategy: Any) -> None:
    """Join the process group without Lightning's device mesh, whose groups nothing destroys."""
    strategy._setup_distributed()


def remove_anonymous(logger: Any) -> None:
    """Leave ``anonymous`` out of wandb's arguments: wandb warns about it, whatever its value."""
    logger._wandb_init.pop("anonymous", None)
