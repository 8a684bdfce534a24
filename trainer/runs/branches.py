"""Whether a control can continue from a checkpoint of its run."""

from __future__ import annotations

from trainer.common.errors import Problem
from trainer.runs.config import RunConfig
from trainer.runs.phases import Phase, phase_at, phases_of, reading


def branch_problems(run: RunConfig, control: RunConfig, step: int) -> list[Problem]:
    """Why ``control`` cannot begin with what ``run`` is after ``step`` steps, one sentence each."""
    main, other = phases_of(run), phases_of(control)
    early = next((phase for phase in main if phase.until and phase.start < step), None)
    if early is not None:
        return [
            Problem(
                "branch", f"{early.name!r} may end early, so that step {step} may lie behind it."
            )
        ]
    starts = {phase.start for phase in (*main, *other) if phase.start < step}
    for start in sorted(starts):
        a, b = phase_at(main, start), phase_at(other, start)
        if _read(a, start) != _read(b, start):
            return [
                Problem(
                    "branch", f"from step {start} on the run reads other samples than the control."
                )
            ]
        if _changes(a, start) != _changes(b, start):
            return [
                Problem(
                    "branch",
                    f"after step {start} the run and the control are not changed alike, and step "
                    f"{step}, from which the control goes on, is later.",
                )
            ]
    return []


def _read(phase: Phase, step: int) -> tuple[object, ...]:
    return phase.first_sample(step), phase.config.trainer.batch_size, reading(phase.config.data)


def _changes(phase: Phase, step: int) -> tuple[object, ...]:
    if phase.start != step or not phase.changes:
        return ()
    return phase.drop, phase.rescale, phase.optimizer_state
