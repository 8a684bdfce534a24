"""A run, resolved once from its words: its phases, their layouts, its controls.

Neighbours with equal sequence length and mixture share one order of samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer.common.errors import UserError
from trainer.common.schedule import Schedule
from trainer.config import (
    MAIN,
    SAME,
    ChangeConfig,
    DataConfig,
    PhaseConfig,
    RescaleConfig,
    RunConfig,
)
from trainer.positional.config import spectrum_of
from trainer.positional.layout import Layout, drop
from trainer.positional.rescaling import RESCALINGS, rebased

if TYPE_CHECKING:
    from trainer.interchange.pretrained import Pretrained

ORDERS = 1_000_003
"""Distance between the seeds of two orders of samples in a run."""


@dataclass(frozen=True)
class Phase:
    """A part of a run, from update ``start`` to before update ``end``.

    ``data``: its text, and the length of its sequences. ``batch_size``: sequences of an update.
    ``micro_batch_size``: sequences of a rank's forward pass, None for all that it has. ``group``:
    keys of both. ``seed``: of its sample order. ``samples``: samples of this order that were read
    before. ``tokens``: tokens that the run read before. ``factor``: factor on the learning rates,
    by the update of the run. ``drop``, ``rescale``, ``optimizer_state``: changes at its start.
    """

    name: str
    start: int
    end: int
    data: DataConfig
    batch_size: int
    micro_batch_size: int | None
    group: str
    seed: int
    samples: int
    tokens: int
    factor: Schedule = field(compare=False)
    drop: ChangeConfig | None = None
    rescale: RescaleConfig | None = None
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.data.sequence_length

    @property
    def has_change(self) -> bool:
        """Whether the model or the optimizer's state changes at its start."""
        return (self.drop, self.rescale, self.optimizer_state) != (None, None, "keep")

    @property
    def description(self) -> str:
        """Description of the changes at its start, in their order."""
        changes = []
        if self.rescale is not None and self.rescale.base is not None:
            changes.append(f"new base of the frequencies ({self.rescale.base:,.0f})")
        elif self.rescale is not None:
            changes.append(f"frequencies rescaled for longer sequences ({self.rescale.method})")
        if self.drop is not None:
            changes.append(f"dropped the encoding ({self.drop.to}){self.drop.of_what}")
            if self.drop.windows is not None:
                windows = ", ".join(str(window or "none") for window in self.drop.windows)
                changes.append(f"windows {windows}")
        sequences = f"phase {self.name!r} with sequences of {self.length:,} tokens"
        if self.optimizer_state != "keep":
            sequences += f", optimizer_state {self.optimizer_state}"
        return "; ".join(changes) or sequences

    @property
    def key(self) -> str:
        """Prefix of its metrics."""
        return f"phase_{self.name}" if self.drop is None else "drop"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an update."""
        return self.batch_size * self.length

    def tokens_at(self, step: int) -> int:
        """Return the tokens read after ``step`` steps of the run, a step of this phase."""
        return self.tokens + (step - self.start) * self.tokens_per_step

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample that a step reads."""
        return self.samples + (step - self.start) * self.batch_size

    def rows(self, ranks: int) -> int:
        """Return the sequences of a forward pass on each of ``ranks``."""
        return self.micro_batch_size or math.ceil(self.batch_size / ranks)

    def micro_batches(self, ranks: int = 1) -> int:
        """Return the number of forward passes of a rank for an update."""
        size = self.rows(ranks)
        if self.batch_size % (ranks * size):
            parts = f"micro-batches of {size} (ranks: {ranks})"
            text = f"{self.batch_size} sequences do not divide into {parts}"
            raise UserError(f"{self.group}.batch_size: {text}")
        return self.batch_size // (ranks * size)


class Phases(tuple[Phase, ...]):
    """The phases of a run, in order."""

    def at(self, step: int) -> Phase:
        """Return the phase of update ``step`` (from 0); after the last update the last phase."""
        return next(phase for phase in reversed(self) if step >= phase.start)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self[-1].tokens_at(self[-1].end)

    @property
    def drop_step(self) -> int | None:
        """Number of steps trained before the first drop, or None."""
        return next((phase.start for phase in self if phase.drop is not None), None)

    def is_dropped(self, step: int) -> bool:
        """Whether the encoding is dropped after ``step`` steps: the checkpoint of the drop's own
        step is from before the drop."""
        return self.drop_step is not None and step > self.drop_step


def phases_of(config: RunConfig) -> Phases:
    """Return the configured phases; by default pretraining and, with a drop, recalibration.

    A phase without a schedule follows the schedule of the whole run, also pretraining that a drop
    ends early: DroPE takes a checkpoint from before the end of an ordinary run.
    """
    phases: list[Phase] = []
    order = start = samples = tokens = 0
    of_run = config.schedule.over(config.trainer.max_steps)
    configured = config.phases or _default_phases(config)
    for name, settings in configured.items():
        data = text_of_phase(config.data, name, settings)
        if phases and phases[-1].data.texts != data.texts:
            order += 1
            samples = 0
        factor = of_run
        if settings.schedule is not None:
            factor = settings.schedule.over(settings.steps, start)
        has_own = settings.batch_size is not None or settings.micro_batch_size is not None
        phase = Phase(
            name,
            start,
            start + settings.steps,
            data,
            batch_size=settings.batch_size or config.trainer.batch_size,
            micro_batch_size=settings.micro_batch_size or config.trainer.micro_batch_size,
            group=f"phases.{name}" if has_own else "trainer",
            seed=config.seed + ORDERS * order,
            samples=samples,
            tokens=tokens,
            factor=factor,
            drop=settings.drop,
            rescale=settings.rescale,
            optimizer_state=settings.optimizer_state,
        )
        phases.append(phase)
        start = phase.end
        samples = phase.first_sample(start)
        tokens = phase.tokens_at(start)
    return Phases(phases)


def _default_phases(config: RunConfig) -> dict[str, PhaseConfig]:
    """Return pretraining, and recalibration if the run drops or has the schedule of a drop."""
    steps = config.trainer.max_steps
    change = config.drop
    step = change.step(steps)
    if step is None:
        return {"pretrain": PhaseConfig(steps)}
    recalibration = PhaseConfig(
        steps - step,
        schedule=change.schedule,
        drop=None if change.to == SAME else change,
        optimizer_state=change.optimizer_state,
    )
    return {"pretrain": PhaseConfig(step), "recalibrate": recalibration}


def text_of_phase(data: DataConfig, name: str, phase: PhaseConfig) -> DataConfig:
    """Return the run's text with a phase's length and weights."""
    mixture = data.mixture
    if phase.weights:
        unknown = phase.weights.keys() - data.mixture.keys()
        if unknown:
            raise UserError(f"phases.{name}.weights: data.mixture has no {sorted(unknown)}")
        mixture = {text: data.mixture[text] | {"weight": w} for text, w in phase.weights.items()}
    length = phase.sequence_length or data.sequence_length
    return replace(data, mixture=mixture, sequence_length=length)


@dataclass(frozen=True, eq=False)
class Run:
    """A run that a command trains or plans.

    ``config``: its words, as its directory records them. ``layout``: the encoding that it begins
    with. ``weights``: the trained model that it begins with, or None. ``controls``: runs that are
    trained beside it, by name. ``is_control``: whether it is one of them. ``branch``: the step of
    its main run whose state it continues from, or "drop", or None.
    """

    config: RunConfig
    phases: Phases
    layout: Layout
    weights: "Pretrained | None" = None
    branch: int | Literal["drop"] | None = None
    is_control: bool = False
    controls: Mapping[str, "Run"] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, "Run"]:
        """This run as ``main``, and its controls, by name."""
        return {MAIN: self, **self.controls}

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return Path(self.config.run_dir)

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.phases[-1].end

    @property
    def kept_steps(self) -> frozenset[int]:
        """Steps with a checkpoint that stays: ends of configured phases, branches of controls."""
        ends = [phase.end for phase in self.phases] if self.config.phases else []
        branches = [run.branch for run in self.controls.values() if isinstance(run.branch, int)]
        return frozenset(ends + branches)


def layout_of_phase(config: RunConfig, phase: Phase, layout: Layout) -> Layout:
    """Return the layout that a phase begins with: the previous one, rescaled, extended and dropped.

    A rescaling starts from the length before; a new encoding is written for the length that it is
    trained on. Raises a ValueError if the change is impossible for this layout.
    """
    rescale = phase.rescale
    change = phase.drop
    if rescale is not None:
        base = rescale.base
        key = f"phases.{phase.name}.rescale"
        layers = layout.chosen(rescale.layers, f"{key}.layers")
        method = RESCALINGS.find(rescale.method, f"{key}.method")
        factor = rescale.factor or phase.length / layout.training_length
        if base is not None:
            layout = layout.map(lambda s: rebased(s, base), layers)
        elif factor > 1:
            layout = layout.rescaled(method, factor, layers)
        else:
            raise UserError(f"{key}: its sequences are no longer than those before")
    layout = replace(layout, training_length=max(layout.training_length, phase.length))
    if change is None:
        return layout
    C = layout.training_length
    key = f"phases.{phase.name}.drop" if config.phases else "drop"
    return drop(
        layout,
        spectrum_of(config.positional, f"{key}.to", change.to, config.model.head_size, C),
        key,
        layers=change.layers,
        heads=change.heads,
        windows=change.windows,
        qk_norm=config.model.qk_norm.when == "after_drop",
    )
