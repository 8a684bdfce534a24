"""A run as a list of phases; the learning rate is a pure function of (phase, step in phase)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.recalibration.schedule import ScheduleConfig
from trainer.runs.config import RunConfig


@dataclass(frozen=True)
class Phase:
    """Steps ``start`` to ``end`` (exclusive) of the run.

    ``horizon`` is the number of steps its schedule is laid out for. Pretraining that a drop cuts
    short follows the schedule of the whole run, as DroPE takes an ordinary run's checkpoint from
    before its end; recalibration has a schedule of its own.
    """

    name: str
    start: int
    end: int
    horizon: int
    schedule: ScheduleConfig

    def factor(self, step: int) -> float:
        """Learning-rate factor at ``step`` of the run."""
        return self.schedule.factor(step - self.start, self.horizon)


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Pretraining and, where there is a drop, recalibration."""
    steps, drop = config.trainer.max_steps, config.drop_step
    if drop is None:
        return (Phase("pretrain", 0, steps, steps, config.schedule),)
    return (
        Phase("pretrain", 0, drop, steps, config.schedule),
        Phase("recalibrate", drop, steps, steps - drop, config.drop.schedule),
    )


def phase_at(phases: tuple[Phase, ...], step: int) -> Phase:
    """The phase that update number ``step`` (from 0) belongs to."""
    return next(phase for phase in reversed(phases) if step >= phase.start)
