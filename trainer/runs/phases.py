"""A run as a list of phases: the settings of each, and the samples that its steps read.

Phases with equal sequence length and mixture share one order of samples. If their batch sizes are
equal as well, they are trained as one stretch. Between stretches there is a checkpoint, from which
the next stretch begins as a resumed run does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainer.data.config import DataConfig
from trainer.recalibration.config import ChangeConfig, ScheduleConfig
from trainer.runs.config import RunConfig
from trainer.runs.phase_config import PhaseConfig, RescaleConfig, UntilConfig
from trainer.runs.saved_state import RECALIBRATION

ORDERS = 1_000_003
"""Between the seeds of two orders of samples in a run."""


@dataclass(frozen=True)
class Phase:
    """Steps ``start`` to ``end`` (exclusive) of a run.

    ``config``: the run's configuration with this phase's changes. ``schedule`` counts steps from
    ``origin`` over ``horizon`` steps. Pretraining that a drop ends early follows the schedule of
    the whole run, since DroPE takes a checkpoint from before the end of an ordinary run;
    recalibration has a schedule of its own. ``tokens``: tokens read before this phase. ``order``:
    number of its order of samples, which begins at step ``order_start``; ``samples`` of it were
    read before this phase. ``drop``, ``rescale``, ``optimizer_state``: changes at its start.
    ``until``: condition for an early end; such a phase is a stretch by itself.
    """

    name: str
    start: int
    end: int
    config: RunConfig
    schedule: ScheduleConfig
    origin: int
    horizon: int
    tokens: int = 0
    order: int = 0
    order_start: int = 0
    samples: int = 0
    drop: ChangeConfig | None = None
    rescale: RescaleConfig | None = None
    optimizer_state: str = "keep"
    until: UntilConfig | None = None

    @property
    def change(self) -> tuple[object, ...]:
        """Changes of the model and of the optimizer's state at its start; empty if there are
        none."""
        changed = self.drop, self.rescale, self.optimizer_state
        return () if changed == (None, None, "keep") else changed

    @property
    def seed(self) -> int:
        """Seed of this phase's sample order."""
        return self.config.seed + ORDERS * self.order

    @cached_property
    def stretch(self) -> tuple[object, ...]:
        """Key that is equal for phases trained in one stretch."""
        run = self.config.trainer
        alone = self.name if self.until else ""
        return self.order, run.batch_size, run.micro_batch_size, run.log_every, alone

    def factor(self, step: int) -> float:
        """Return the learning-rate factor at ``step`` of the run."""
        return self.schedule.factor(step - self.origin, self.horizon)

    def tokens_at(self, step: int) -> int:
        """Return the tokens read after ``step`` steps of the run, a step of this phase."""
        return self.tokens + (step - self.start) * self.config.tokens_per_step

    def first_sample(self, step: int, skips: Sequence[Sequence[int]] = ()) -> int:
        """Return the number of the first sample that a step reads.

        ``skips``: pairs (step, samples) of samples that are skipped from that step on.
        """
        left_out = sum(n for at, n in skips if self.order_start <= at <= step)
        return self.samples + (step - self.start) * self.config.trainer.batch_size + left_out


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Return the configured phases; by default pretraining and, with a drop, recalibration."""
    steps = config.trainer.max_steps
    if not config.phases:
        drop, change = config.drop_step, config.drop
        whole = Phase("pretrain", 0, steps, config, config.schedule, 0, steps)
        if drop is None:
            return (whole,)
        recalibrate = replace(
            whole,
            name=RECALIBRATION,
            start=drop,
            schedule=change.schedule,
            origin=drop,
            horizon=steps - drop,
            tokens=drop * config.tokens_per_step,
            samples=drop * config.trainer.batch_size,
            drop=change,
            optimizer_state=change.optimizer_state,
        )
        return (replace(whole, end=drop), recalibrate)
    found: list[Phase] = []
    for name, phase in config.phases.items():
        found.append(_next(config, found, name, phase))
    return tuple(found)


def _next(config: RunConfig, before: list[Phase], name: str, phase: PhaseConfig) -> Phase:
    own = config_in(config, phase)
    assert phase.steps is not None
    start, last = (before[-1].end, before[-1]) if before else (0, None)
    end = start + phase.steps
    made = Phase(
        name,
        start,
        end,
        own,
        phase.schedule or config.schedule,
        start if phase.schedule else 0,
        phase.steps if phase.schedule else config.trainer.max_steps,
        drop=phase.drop,
        rescale=phase.rescale,
        optimizer_state=phase.optimizer_state,
        until=phase.until,
    )
    if last is None:
        return made
    made = replace(made, tokens=last.tokens_at(start))
    if reading(last.config.data) == reading(own.data):
        at = last.samples + (start - last.start) * last.config.trainer.batch_size
        return replace(made, order=last.order, order_start=last.order_start, samples=at)
    return replace(made, order=last.order + 1, order_start=start)


def reading(data: DataConfig) -> tuple[object, ...]:
    """Return a key that is equal for data read in the same order: texts, weights and lengths."""
    texts = sorted((name, repr(text), float(weight)) for name, (text, weight) in data.texts.items())
    return data.sequence_length, tuple(texts)


def config_in(config: RunConfig, phase: PhaseConfig) -> RunConfig:
    """Return the run's configuration with a phase's lengths, batch sizes and texts."""
    data, run = config.data, config.trainer
    if phase.sequence_length is not None:
        data = replace(data, sequence_length=phase.sequence_length)
    if phase.weights is not None:
        mixture = {
            name: {**data.mixture[name], "weight": weight}
            for name, weight in phase.weights.items()
            if name in data.mixture
        }
        data = replace(data, mixture=mixture)
    sizes = {
        key: value
        for key in ("batch_size", "micro_batch_size", "log_every")
        if (value := getattr(phase, key)) is not None
    }
    return replace(config, data=data, trainer=replace(run, **sizes))


def with_lengths(config: RunConfig) -> RunConfig:
    """Return the configuration with steps computed from tokens, for the run and for each phase.

    Without valid batch sizes the configuration is returned unchanged.
    """
    run, size = config.trainer, config.tokens_per_step
    if not config.phases:
        if run.max_tokens is None or run.max_tokens < 1 or size < 1:
            return config
        return replace(config, trainer=replace(run, max_steps=-(-run.max_tokens // size)))
    phases = {}
    for name, phase in config.phases.items():
        size, given = config_in(config, phase).tokens_per_step, phase.tokens
        steps = phase.steps if given is None or size < 1 else -(-given // size)
        phases[name] = replace(phase, steps=steps)
    steps = max(sum(phase.steps or 0 for phase in phases.values()), 1)
    return replace(config, phases=phases, trainer=replace(run, max_steps=steps))


def with_ends(config: RunConfig, ends: Mapping[str, int]) -> RunConfig:
    """Return the configuration with the actual ends of phases that ended early; ``ends``: their
    steps."""
    if not ends:
        return config
    phases = {
        name: replace(phase, steps=ends[name], tokens=None) if name in ends else phase
        for name, phase in config.phases.items()
    }
    return with_lengths(replace(config, phases=phases))


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of update ``step`` (from 0); after the last update the last phase."""
    return next(phase for phase in reversed(phases) if step >= phase.start)


def phase_before(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of the last of ``step`` updates; before the first update the first phase."""
    return phase_at(phases, max(step - 1, 0))


def stretch_end(phases: Sequence[Phase], step: int) -> int:
    """Return the step at which the stretch of update ``step`` ends."""
    stretch, end = phase_at(phases, step).stretch, step
    for phase in phases:
        if phase.end > step and phase.stretch == stretch and phase.start <= max(end, step):
            end = phase.end
    return end


def samples_between(phases: Sequence[Phase], first: int, end: int) -> int:
    """Return how many samples of their order the steps ``first`` to ``end`` (exclusive) read."""
    order = phase_at(phases, first).order
    return sum(
        (min(phase.end, end) - max(phase.start, first)) * phase.config.trainer.batch_size
        for phase in phases
        if phase.order == order and phase.start < end and phase.end > first
    )


def training_length_at(config: RunConfig, step: int) -> int:
    """Return the tokens of a sequence that the last of ``step`` updates read, at least one."""
    return phase_before(phases_of(config), step).config.data.sequence_length


def kept_steps(config: RunConfig) -> frozenset[int]:
    """Return the steps with permanent checkpoints: ends of phases, and branches of controls."""
    ends = {phase.end for phase in phases_of(config)} if config.phases else set()
    branches = {changes.get("branch") for changes in config.controls.values()}
    return frozenset(ends | {step for step in branches if isinstance(step, int)})


def tokens_at(config: RunConfig, step: int) -> int:
    """Return the tokens read after ``step`` steps."""
    return phase_before(phases_of(config), step).tokens_at(step)
