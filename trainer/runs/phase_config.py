"""One phase of a run: its length, its batches, and the changes at its start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.common.errors import Problem, did_you_mean, listed
from trainer.common.fields import Count, Integer, Number, Positive, configuration
from trainer.positional.layout import LayerChoice, layer_problems
from trainer.positional.rescaling import RESCALINGS
from trainer.recalibration.config import ChangeConfig, ScheduleConfig


@configuration
class RescaleConfig:
    """Frequencies slowed at the start of a phase, for good."""

    method: str = "yarn"
    """pi, ntk, ntk_by_parts, yarn, llama3, yarn_full_range, ntk_by_parts_turns, yarn_turns, or
    base (a new base, see base)."""
    factor: Annotated[Number, Field(gt=1, le=1_000_000)] | None = None
    """How much longer sequences get; null: the phase's sequences over the longest trained on
    before."""
    base: Annotated[Number, Field(gt=1)] | None = None
    """New base theta of the frequencies base^(-2i/d), for method base; null: see method."""
    layers: LayerChoice = None
    """Layers to rescale: all, full_attention (those without a window), or indices; null: the
    layers that see more than the longest sequences before."""

    @listed
    def problems(self, key: str, num_layers: int) -> Iterator[Problem]:
        """Check the values for a model of ``num_layers``; ``key``: path of the group."""
        yield from layer_problems(f"{key}.layers", self.layers, num_layers)
        if self.method == "base":
            if self.base is None:
                yield Problem(f"{key}.base", "expected the new base, such as 2e6.")
            if self.factor is not None:
                yield Problem(f"{key}.factor", "method base has none; leave it out.")
        elif self.base is not None:
            yield Problem(f"{key}.base", "is for method base; give that, or leave it out.")
        if self.method not in {*RESCALINGS, "base"}:
            near = did_you_mean(self.method, [*RESCALINGS, "base"])
            yield Problem(f"{key}.method", f"unknown method {self.method!r}.", near)


@configuration
class UntilConfig:
    """When a phase ends before its steps are done, by its loss on the held-out effect batch."""

    every: Count = 100
    """Steps between looks at the loss."""
    flat: Positive | None = None
    """End if the loss has fallen by less than so many nats per token over the last looks; null:
    not for this reason."""
    patience: Count = 3
    """Number of looks that flat compares over."""
    back_within: Number | None = None
    """End if the loss is at most so many nats above what it was before the phase changed the
    model; null: not for this reason."""

    @listed
    def problems(self, key: str, changes: bool) -> Iterator[Problem]:
        """Check the values; ``changes``: whether the phase changes the model."""
        if self.flat is None and self.back_within is None:
            yield Problem(key, f"give {key}.flat or {key}.back_within, in nats per token.")
        if self.back_within is not None and not changes:
            yield Problem(f"{key}.back_within", "the phase drops and rescales nothing; give flat.")


@configuration
class PhaseConfig:
    """A part of a run; what is null is as the run has it."""

    steps: Count | None = None
    """Optimizer steps of the phase; null: see tokens."""
    tokens: Count | None = None
    """Length in tokens, which takes precedence over steps; null: see steps."""
    sequence_length: Annotated[Integer, Field(ge=2, lt=1 << 31)] | None = None
    """Tokens of a sequence; null: data.sequence_length."""
    batch_size: Count | None = None
    """Sequences per optimizer step; null: trainer.batch_size."""
    micro_batch_size: Count | None = None
    """Sequences per forward pass of one rank; null: trainer.micro_batch_size."""
    weights: dict[str, Positive] | None = None
    """Weights of data.mixture's texts by name; a text that is not named is not read. Null: those
    of the run."""
    schedule: ScheduleConfig | None = None
    """Learning rate of the phase; null: the run's, laid out over all phases, continues."""
    drop: ChangeConfig | None = None
    """What is dropped at the start; null: nothing."""
    rescale: RescaleConfig | None = None
    """How frequencies are slowed at the start; null: not at all."""
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"
    """State of the optimizer at the start: keep, reset, or reset_new (only of parameters that
    the drop adds)."""
    until: UntilConfig | None = None
    """When the phase ends before its steps are done; null: never."""
    log_every: Count | None = None
    """Steps between logged rows; null: trainer.log_every."""

    @listed
    def problems(self, key: str, texts: list[str], num_layers: int) -> Iterator[Problem]:
        """Check what can be checked without the run.

        ``texts``: names of the mixture's texts; empty for a single text.
        """
        if self.steps is None and self.tokens is None:
            yield Problem(key, f"how long is it? Give {key}.steps or {key}.tokens.")
            return
        if self.weights is not None:
            yield from self._weight_problems(f"{key}.weights", self.weights, texts)
        if self.rescale is not None:
            yield from self.rescale.problems(f"{key}.rescale", num_layers)
        if self.until is not None:
            changes = self.drop is not None or self.rescale is not None
            yield from self.until.problems(f"{key}.until", changes)
        if self.rescale is not None and self.drop is not None:
            yield Problem(f"{key}.rescale", f"give it a phase apart from {key}.drop.")

    @staticmethod
    def _weight_problems(
        key: str, weights: dict[str, float], texts: list[str]
    ) -> Iterator[Problem]:
        if not texts:
            yield Problem(key, "there is one text; data.mixture names several.")
            return
        if not weights:
            yield Problem(key, "nothing is read; name a text.")
        for name in weights:
            if name not in texts:
                near = did_you_mean(name, texts)
                yield Problem(f"{key}.{name}", "no text of data.mixture.", near)
