"""Checks of a run's phases, and of the steps at which its controls branch off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter

from trainer.common.errors import Problem, did_you_mean
from trainer.model.config import ModelConfig
from trainer.positional.encodings import ENCODINGS
from trainer.runs.config import NAME, RunConfig, layout_problems
from trainer.runs.phases import Phase, phase_at, phases_of, reading


def phase_problems(config: RunConfig) -> list[Problem]:
    """Check the phases of an otherwise valid run."""
    found: list[Problem] = []
    if not config.phases:
        return found
    texts = list(config.data.mixture)
    for name, given in config.phases.items():
        if not NAME.fullmatch(name):
            found.append(Problem("phases", f"{name!r}: expected letters, digits and ._+- only."))
        found += given.problems(f"phases.{name}", texts, config.model.num_hidden_layers)
    if config.drop.at is not None or config.drop.at_tokens is not None:
        found.append(
            Problem("drop", "with phases it is one of them that drops; give phases.NAME.drop.")
        )
    if found or any(phase.steps is None for phase in config.phases.values()):
        return found  # Without valid batch sizes, steps are unknown; that is reported elsewhere.
    phases, model = phases_of(config), config.model
    for (earlier, before), (later, after) in pairwise(config.phases.items()):
        if before.until is not None and after.schedule is None:
            found.append(
                Problem(
                    f"phases.{later}.schedule",
                    f"needed, since {earlier!r} may end early, and the run's is laid out over all "
                    "steps.",
                )
            )
    for phase in phases:
        key = f"phases.{phase.name}"
        found += [
            problem.renamed({"trainer": key, "data": key})
            for problem in (*phase.config.trainer.problems(), *phase.config.data.problems())
            if problem.key != "trainer.profile_steps"
        ]
        if phase.drop is not None:
            found += phase.drop.change_problems(
                f"{key}.drop",
                model.num_hidden_layers,
                model.num_key_value_heads,
                phase.end - phase.start,
                phase.config.data.sequence_length,
            )
            if phase.drop.to not in {*ENCODINGS, *config.positional.encodings}:
                near = did_you_mean(phase.drop.to, ENCODINGS)
                found.append(
                    Problem(f"{key}.drop.to", f"unknown encoding {phase.drop.to!r}.", near)
                )
            if not phase.start and not model.is_trained:
                found.append(
                    Problem(f"{key}.drop", "nothing is trained yet; drop in a later phase.")
                )
        if phase.until is not None and phase.until.every > phase.end - phase.start:
            found.append(
                Problem(
                    f"{key}.until.every",
                    f"expected at most {phase.end - phase.start}, the phase's steps, got "
                    f"{phase.until.every}; it would never look.",
                )
            )
    return found or [*_rescale_problems(config, phases), *_drop_problems(config, phases)]


def _rescale_problems(config: RunConfig, phases: Sequence[Phase]) -> list[Problem]:
    """Rescalings for sequences that are no longer than those before."""
    if config.model.is_trained:
        return []  # known only once the weights are read
    longest, found = 0, []
    for phase in phases:
        length = phase.config.data.sequence_length
        rescale = phase.rescale
        same = rescale is not None and rescale.factor is None and rescale.base is None
        if same and length <= longest:
            found.append(
                Problem(
                    f"phases.{phase.name}.rescale",
                    f"its sequences of {length:,} tokens are not longer than those before, so "
                    "that nothing would change; give a sequence_length or rescale.factor.",
                )
            )
        longest = max(longest, length)
    return found


def _drop_problems(config: RunConfig, phases: Sequence[Phase]) -> list[Problem]:
    """Check the drops against the layout that the run begins with."""
    if config.model.from_pretrained is not None or any(phase.rescale for phase in phases):
        return []  # known only once the weights are read
    drops = {f"phases.{phase.name}.drop": phase.drop for phase in phases if phase.drop is not None}
    return layout_problems(config.positional, config.model, config.data.sequence_length, drops)


CONTINUED = (
    *(f"model.{field.name}" for field in fields(ModelConfig) if field.name != "attention_backend"),
    "positional",
    "optimizer.name",
    "seed",
)
"""Keys whose value a checkpoint determines for a control that continues from it."""


def branch_problems(run: RunConfig, control: RunConfig, step: int) -> list[Problem]:
    """Return why ``control`` cannot continue from the checkpoint of ``run`` after ``step``."""
    if differing := [key for key in CONTINUED if attrgetter(key)(run) != attrgetter(key)(control)]:
        return [
            Problem(
                key,
                "a control that branches off continues with the run's; leave it out, or leave out "
                "branch.",
            )
            for key in differing
        ]
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
        changes = [phase.change if phase.start == start else () for phase in (a, b)]
        if changes[0] != changes[1]:
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
