"""What this program touches of Lightning that is no part of its public interface.

Nothing else in the package does, so that a new version of Lightning is checked in one place.
"""

from __future__ import annotations

import lightning as L


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Keep Lightning from asking all ranks at every batch whether one of them got SIGTERM.

    It would wait for the device to answer; the ``Preemption`` callback asks without waiting.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def set_steps_done(trainer: L.Trainer, steps: int) -> None:
    """Have ``trainer.global_step`` begin at ``steps``.

    Lightning's own way is its checkpoint format, which holds whole tensors and the state of loops
    over a loader; here the loader is made from its first step on.
    """
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    progress.total.ready = progress.total.completed = steps
