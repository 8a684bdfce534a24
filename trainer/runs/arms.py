"""All configurations of an experiment: the run, its controls, and the phases of each.

A check that looks at the run alone finds no fault in a later phase or in a control, which then ends
a job after hours. So checks get their configurations from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainer.common.errors import Problem
from trainer.runs.config import RunConfig
from trainer.runs.directory import plain
from trainer.runs.parsing import control_config
from trainer.runs.phases import phases_of

MAIN = "main"
"""What the run itself is called among its arms."""
Check = Callable[[RunConfig], Sequence[Problem]]
"""What is wrong with a configuration, one sentence each."""


def arms_of(config: RunConfig, weights: bool = True) -> dict[str, RunConfig]:
    """Return the configurations of the run, first and as ``main``, and of its controls by name.

    ``weights``: whether those that they begin with are here; else they have the configured shape.
    """
    controls = {name: control_config(plain(config), name, weights) for name in config.controls}
    return {MAIN: config, **controls}


def phase_configs(arms: Mapping[str, RunConfig]) -> list[tuple[str, RunConfig]]:
    """Return the configuration of every phase of every arm, with the name of the arm."""
    return [(name, phase.config) for name, arm in arms.items() for phase in phases_of(arm)]


def arm_problems(
    arms: Mapping[str, RunConfig],
    of_run: Sequence[Check] = (),
    of_phase: Sequence[Check] = (),
) -> list[Problem]:
    """Return what is wrong with any arm; what is wrong with a control alone is said under its name.

    Args:
        arms: of :func:`arms_of`.
        of_run: checks of what does not change while a run trains.
        of_phase: checks of sizes, lengths and texts, which each phase may change.
    """
    found = {name: [p for check in of_run for p in check(arm)] for name, arm in arms.items()}
    for name, config in phase_configs(arms):
        found[name] += [problem for check in of_phase for problem in check(config)]
    shared = {*found[MAIN]}
    named = [
        problem if name == MAIN or problem in shared else problem.under(f"controls.{name}")
        for name, problems in found.items()
        for problem in problems
    ]
    return list(dict.fromkeys(named))
