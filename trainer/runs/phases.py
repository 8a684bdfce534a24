"""A run as a list of phases: their settings, the samples that their steps read, and their layouts.

Phases with equal sequence length and mixture share one order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.common.errors import UserError
from trainer.config import SAME, PhaseConfig, RunConfig
from trainer.positional.config import build_layout, spectrum_of
from trainer.positional.layout import Layout, drop
from trainer.positional.rescaling import RESCALINGS, rebased

ORDERS = 1_000_003
"""Distance between the seeds of two orders of samples in a run."""


@dataclass(frozen=True)
class Phase:
    """A part of a run, which begins after ``start`` steps.

    ``settings``: its number of steps, its schedule, and the changes at its start. ``config``: the
    run's configuration with this phase's lengths, batch sizes and texts. ``tokens``: tokens read
    before this phase. ``order``: number of its order of samples, of which ``samples`` were read
    before this phase.
    """

    name: str
    start: int
    settings: PhaseConfig
    config: RunConfig
    tokens: int = 0
    order: int = 0
    samples: int = 0

    @property
    def end(self) -> int:
        """Number of steps of the run after this phase."""
        return self.start + self.settings.steps

    @property
    def change(self) -> tuple[object, ...]:
        """Changes of the model and of the optimizer's state at its start; empty if there are
        none."""
        settings = self.settings
        changed = settings.drop, settings.rescale, settings.optimizer_state
        return () if changed == (None, None, "keep") else changed

    @property
    def description(self) -> str:
        """Description of the changes at its start."""
        change, rescale = self.settings.drop, self.settings.rescale
        if change is not None:
            text = f"dropped the encoding ({change.to}){change.of_what}"
            windows = ", ".join(str(window or "none") for window in change.windows or ())
            return f"{text}; windows {windows}" if windows else text
        if rescale is not None and rescale.base is not None:
            return f"new base of the frequencies ({rescale.base:,.0f})"
        if rescale is not None:
            return f"frequencies rescaled for longer sequences ({rescale.method})"
        length = self.config.data.sequence_length
        return f"phase {self.name!r} with sequences of {length:,} tokens"

    @property
    def key(self) -> str:
        """Prefix of its metrics."""
        return "drop" if self.settings.drop else f"phase_{self.name}"

    @property
    def seed(self) -> int:
        """Seed of this phase's sample order."""
        return self.config.seed + ORDERS * self.order

    def factor(self, step: int) -> float:
        """Return the learning-rate factor at ``step`` of the run.

        A phase without a schedule follows the schedule of the whole run, also pretraining that a
        drop ends early: DroPE takes a checkpoint from before the end of an ordinary run.
        """
        if (schedule := self.settings.schedule) is not None:
            return schedule.factor(step - self.start, self.settings.steps)
        return self.config.schedule.factor(step, self.config.trainer.max_steps)

    def tokens_at(self, step: int) -> int:
        """Return the tokens read after ``step`` steps of the run, a step of this phase."""
        return self.tokens + (step - self.start) * self.config.tokens_per_step

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample that a step reads."""
        return self.samples + (step - self.start) * self.config.trainer.batch_size


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Return the configured phases; by default pretraining and, with a drop, recalibration."""
    phases: list[Phase] = []
    for name, settings in (config.phases or _default_phases(config)).items():
        phase = Phase(name, 0, settings, config_in(config, settings))
        if phases:
            last = phases[-1]
            end, order, samples = last.end, last.order, last.first_sample(last.end)
            if last.config.data.texts != phase.config.data.texts:
                order, samples = order + 1, 0
            tokens = last.tokens_at(end)
            phase = replace(phase, start=end, tokens=tokens, order=order, samples=samples)
        phases.append(phase)
    return tuple(phases)


def _default_phases(config: RunConfig) -> dict[str, PhaseConfig]:
    steps, change = config.trainer.max_steps, config.drop
    if (step := change.step(steps)) is None:
        return {"pretrain": PhaseConfig(steps)}
    recalibration = PhaseConfig(
        steps - step,
        schedule=change.schedule,
        drop=None if change.to == SAME else change,
        optimizer_state=change.optimizer_state,
    )
    return {"pretrain": PhaseConfig(step), "recalibrate": recalibration}


def config_in(config: RunConfig, phase: PhaseConfig) -> RunConfig:
    """Return the run's configuration with a phase's lengths, batch sizes and texts."""
    data, run = config.data, config.trainer
    if phase.weights is not None:
        mixture = {
            name: {**data.mixture[name], "weight": weight} for name, weight in phase.weights.items()
        }
        data = replace(data, mixture=mixture)
    data = replace(data, sequence_length=phase.sequence_length or data.sequence_length)
    run = replace(
        run,
        batch_size=phase.batch_size or run.batch_size,
        micro_batch_size=phase.micro_batch_size or run.micro_batch_size,
    )
    return replace(config, data=data, trainer=run)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of update ``step`` (from 0); after the last update the last phase."""
    return next(phase for phase in reversed(phases) if step >= phase.start)


def drop_step(config: RunConfig) -> int | None:
    """Return the number of steps trained before the first drop, or None."""
    return next((phase.start for phase in phases_of(config) if phase.settings.drop), None)


def kept_steps(config: RunConfig) -> frozenset[int]:
    """Return the steps with a checkpoint that stays: ends of phases, and branches of controls."""
    ends = [phase.end for phase in phases_of(config)] if config.phases else ()
    branches = [changes.get("branch") for changes in config.controls.values()]
    return frozenset([*ends, *(step for step in branches if isinstance(step, int))])


# Layouts


def configured_layout(config: RunConfig) -> Layout:
    """Return the layout that a run without trained weights begins with.

    Raises:
        UserError: the configured encodings do not fit the model.
    """
    model = config.model
    return build_layout(
        config.positional,
        num_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_size,
        training_length=config.data.sequence_length,
        qk_norm=model.qk_norm.when == "always",
    )


def layout_of_phase(layout: Layout, phase: Phase) -> Layout:
    """Return the layout that a phase begins with: the previous one, rescaled, extended and dropped.

    A rescaling starts from the length before; a new encoding is written for the length that it is
    trained on.

    Raises:
        ValueError: the change is impossible for this layout.
    """
    config, rescale, change = phase.config, phase.settings.rescale, phase.settings.drop
    length = config.data.sequence_length
    if rescale is not None and rescale.base is not None:
        base = rescale.base
        layout = layout.map(lambda s: rebased(s, base), rescale.layers)
    elif rescale is not None:
        factor = rescale.factor or length / layout.training_length
        if factor <= 1:
            key = f"phases.{phase.name}.rescale"
            raise UserError(f"{key}: its sequences are no longer than those before")
        layout = layout.rescaled(RESCALINGS[rescale.method], factor, rescale.layers)
    layout = replace(layout, training_length=max(layout.training_length, length))
    if change is None:
        return layout
    return drop(
        layout,
        spectrum_of(config.positional, change.to, config.model.head_size, layout.training_length),
        layers=change.layers,
        heads=change.heads,
        windows=change.windows,
        qk_norm=config.model.qk_norm.when == "after_drop",
    )
