"""The ``drop`` configuration group, and the step it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.recalibration.schedule import ScheduleConfig


@dataclass(frozen=True)
class DropConfig:
    """When the encoding is dropped, what replaces it, and how training goes on.

    ``at``: a step (integer; 0 only for pretrained weights) or a fraction of the run (0.85);
    ``at_tokens``: the first step by which so many tokens were seen; both null: never. ``enabled``:
    false leaves out a drop that is set. ``layers``: indices, null for all. ``to``: the encoding
    that replaces it. ``qk_norm_gain``: where QK-norm comes on at the drop, its gain is 1 or matched
    to the RMS that queries and keys have on the effect batch. ``optimizer_state``: keep, reset, or
    reset for the new parameters only. ``schedule``: the learning rate from the drop to the end.
    ``effect_sequences``: size of the fixed held-out batch whose loss is reported before and after.
    """

    enabled: bool = True
    at: int | float | None = None
    at_tokens: int | None = None
    layers: list[int] | None = None
    to: str = "nope"
    qk_norm_gain: Literal["one", "matched"] = "one"
    optimizer_state: Literal["keep", "reset", "reset_new"] = "reset"
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    effect_sequences: int = 64

    def step(self, max_steps: int, tokens_per_step: int) -> int | None:
        """The number of steps trained before the drop, or None for never."""
        if not self.enabled:
            return None
        if self.at_tokens is not None:
            return -(-self.at_tokens // tokens_per_step)
        if isinstance(self.at, float):
            return round(self.at * max_steps)
        return self.at

    def problems(
        self, max_steps: int, tokens_per_step: int, num_layers: int, pretrained: bool = False
    ) -> list[str]:
        """What is impossible for a run of that length and depth, one sentence each.

        ``pretrained``: the run begins with trained weights, which may drop before the first step.
        """
        found = self.schedule.problems("drop.schedule")
        if self.at is not None and self.at_tokens is not None:
            found.append("drop: give either drop.at or drop.at_tokens, not both.")
        step = self.step(max_steps, tokens_per_step)
        first = 0 if pretrained else 1
        if step is not None and not first <= step < max_steps:
            key = "at" if self.at_tokens is None else "at_tokens"
            found.append(
                f"drop.{key}: {getattr(self, key)} is step {step}, but the run has steps {first} "
                f"to {max_steps - 1} to drop at (trainer.max_steps is {max_steps}); give such a "
                "step, a fraction between 0 and 1, or null for no drop."
            )
        if self.layers == []:
            found.append("drop.layers: an empty list drops nothing; null means all layers.")
        found += [
            f"drop.layers: layer {i} does not exist in a model of {num_layers} layers."
            for i in self.layers or []
            if not -num_layers <= i < num_layers
        ]
        if self.effect_sequences < 1:
            found.append(f"drop.effect_sequences: expected 1 or more, got {self.effect_sequences}.")
        return found
