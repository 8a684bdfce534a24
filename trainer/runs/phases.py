"""A run as a list of phases: their settings, the samples that their steps read, and their checks.

Phases with equal sequence length and mixture share one order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Literal

from trainer.config import (
    SAME,
    ChangeConfig,
    DataConfig,
    PhaseConfig,
    RescaleConfig,
    RunConfig,
    ScheduleConfig,
)
from trainer.model.config import ModelConfig

RECALIBRATION = "recalibrate"
"""The phase after the drop of a run that names no phases."""
ORDERS = 1_000_003
"""Distance between the seeds of two orders of samples in a run."""


@dataclass(frozen=True)
class Phase:
    """Steps ``start`` to ``end`` (exclusive) of a run.

    ``config``: the run's configuration with this phase's changes. ``schedule`` counts steps from
    ``origin`` over ``horizon`` steps. Pretraining that a drop ends early follows the schedule of
    the whole run, since DroPE takes a checkpoint from before the end of an ordinary run;
    recalibration has a schedule of its own. ``tokens``: tokens read before this phase. ``order``:
    number of its order of samples, of which ``samples`` were read before this phase. ``drop``,
    ``rescale``, ``optimizer_state``: changes at its start.
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
    samples: int = 0
    drop: ChangeConfig | None = None
    rescale: RescaleConfig | None = None
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"

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

    def factor(self, step: int) -> float:
        """Return the learning-rate factor at ``step`` of the run."""
        return self.schedule.factor(step - self.origin, self.horizon)

    def tokens_at(self, step: int) -> int:
        """Return the tokens read after ``step`` steps of the run, a step of this phase."""
        return self.tokens + (step - self.start) * self.config.tokens_per_step

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample that a step reads."""
        return self.samples + (step - self.start) * self.config.trainer.batch_size


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Return the configured phases; by default pretraining and, with a drop, recalibration."""
    steps = config.trainer.max_steps
    if not config.phases:
        change = config.drop
        drop = change.step(steps)
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
            drop=None if change.to == SAME else change,
            optimizer_state=change.optimizer_state,
        )
        return (replace(whole, end=drop), recalibrate)
    phases: list[Phase] = []
    for name, phase in config.phases.items():
        phases.append(_next(config, phases[-1] if phases else None, name, phase))
    return tuple(phases)


def _next(config: RunConfig, last: Phase | None, name: str, settings: PhaseConfig) -> Phase:
    start = last.end if last else 0
    phase = Phase(
        name,
        start,
        start + settings.steps,
        config_in(config, settings),
        settings.schedule or config.schedule,
        start if settings.schedule else 0,
        settings.steps if settings.schedule else config.trainer.max_steps,
        drop=settings.drop,
        rescale=settings.rescale,
        optimizer_state=settings.optimizer_state,
    )
    if last is None:
        return phase
    phase = replace(phase, tokens=last.tokens_at(start))
    if reading(last.config.data) != reading(phase.config.data):
        return replace(phase, order=last.order + 1)
    samples = last.samples + (start - last.start) * last.config.trainer.batch_size
    return replace(phase, order=last.order, samples=samples)


NOT_OF_SAMPLES = {
    "num_workers": "the order of samples does not depend on who reads them",
    "cache_dir": "prepared text is the same in any directory",
}
"""Keys of ``data`` that change no sample, with the reason."""


def reading(data: DataConfig) -> tuple[object, ...]:
    """Return a key that is equal for data read in the same order: texts, weights and lengths."""

    def samples(text: DataConfig) -> str:
        values = asdict(text).items()
        return repr([value for key, value in values if key not in NOT_OF_SAMPLES])

    texts = sorted(
        (name, samples(text), float(weight)) for name, (text, weight) in data.texts.items()
    )
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
        for key in ("batch_size", "micro_batch_size")
        if (value := getattr(phase, key)) is not None
    }
    return replace(config, data=data, trainer=replace(run, **sizes))


def with_lengths(config: RunConfig) -> RunConfig:
    """Return the configuration with the steps of all phases as ``trainer.max_steps``."""
    if not config.phases:
        return config
    steps = sum(phase.steps for phase in config.phases.values())
    return replace(config, trainer=replace(config.trainer, max_steps=steps))


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of update ``step`` (from 0); after the last update the last phase."""
    return next(phase for phase in reversed(phases) if step >= phase.start)


def phase_before(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of the last of ``step`` updates; before the first update the first phase."""
    return phase_at(phases, max(step - 1, 0))


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


CONTINUED = (
    *(f"model.{field.name}" for field in fields(ModelConfig) if field.name != "attention_backend"),
    "positional",
    "optimizer.name",
    "seed",
)
"""Keys whose value a checkpoint determines for a control that continues from it."""


def branch_problem(run: RunConfig, control: RunConfig, step: int) -> str | None:
    """Return why ``control`` cannot continue from the checkpoint of ``run`` after ``step``."""
    for key in CONTINUED:
        if attrgetter(key)(run) != attrgetter(key)(control):
            return f"{key}: a control that branches off continues with the run's"
    main, other = phases_of(run), phases_of(control)
    starts = {phase.start for phase in (*main, *other) if phase.start < step}
    for start in sorted(starts):
        a, b = phase_at(main, start), phase_at(other, start)
        if _read(a, start) != _read(b, start):
            return f"branch: from step {start} on the run reads other samples than the control"
        changes = [phase.change if phase.start == start else () for phase in (a, b)]
        if changes[0] != changes[1]:
            return f"branch: after step {start} the run and the control are changed differently"
    return None


def _read(phase: Phase, step: int) -> tuple[object, ...]:
    return phase.first_sample(step), phase.config.trainer.batch_size, reading(phase.config.data)
