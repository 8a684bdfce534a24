"""The configuration groups ``drop`` and ``schedule``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from trainer.common.errors import Problem, listed
from trainer.common.fields import (
    LARGEST,
    Count,
    Integer,
    Natural,
    Number,
    Rate,
    Share,
    configuration,
)


@configuration
class ScheduleConfig:
    """Learning rate of one phase, as a multiple of the optimizer's learning rates."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine (falls to the end), wsd (stays, then falls over the last
    decay_fraction), constant."""
    peak: Rate = 1.0
    """Factor on the optimizer's learning rates after the warm-up."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up from 0 to the peak."""
    final: Share = 0.1
    """Factor at the end, as a share of the peak."""
    decay_fraction: Share = 0.2
    """Share of the phase over which wsd falls."""

    def factor(self, step: int, length: int) -> float:
        """Return the factor on the base learning rate for update ``step`` of ``length``."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        start = self.warmup_steps
        if self.name == "wsd":
            start = max(start, round(length * (1 - self.decay_fraction)))
        progress = min(max((step - start) / max(length - start, 1), 0.0), 1.0)
        fall = progress if self.name == "wsd" else (1 - math.cos(math.pi * progress)) / 2
        return self.peak * (1 - (1 - self.final) * fall)


@configuration
class ChangeConfig:
    """Choice of the encodings to drop, and their replacement."""

    layers: list[Integer] | None = None
    """Indices of the layers to drop; null: all."""
    heads: list[Integer] | None = None
    """Indices of the key-value heads of these layers; null: all."""
    to: str = "nope"
    """Encoding that takes the place, named as in positional."""
    windows: list[Count | None] | None = None
    """Sliding windows of all layers from the drop on, in tokens, repeated over the depth; null:
    those before."""
    qk_norm_gain: Literal["one", "matched"] = "one"
    """Gain of a QK-norm that comes on at the drop: one, or matched (to the RMS of queries and
    keys on the effect batch)."""

    @property
    def of_what(self) -> str:
        """Description of the choice, such as ``" of layers 0, 1"``; empty for all layers."""
        parts = [
            f"{name} {', '.join(map(str, chosen))}"
            for name in ("layers", "heads")
            if (chosen := getattr(self, name)) is not None
        ]
        return f" of {', '.join(parts)}" if parts else ""

    @listed
    def change_problems(
        self, key: str, num_layers: int, num_heads: int, length: int
    ) -> Iterator[Problem]:
        """Check the change, the group at ``key``, for a model of this shape.

        ``length``: tokens of a sequence after the drop.
        """
        windows = f"{key}.windows"
        if self.windows == []:
            yield Problem(windows, "expected at least one entry, or null.")
        if (count := len(self.windows or ())) > num_layers:
            yield Problem(
                windows,
                f"expected one for each of the {num_layers} layers at most, got {count}: the last "
                "ones would have no layer.",
            )
        for window in self.windows or []:
            if window is not None and window > length:
                yield Problem(
                    windows,
                    f"a window of {window} tokens does not fit sequences of {length}; expected 1 "
                    f"to {length}, or null for none.",
                )
        for name, count, noun, plural in (
            ("layers", num_layers, "layer", "layers"),
            ("heads", num_heads, "head", "key-value heads"),
        ):
            chosen = getattr(self, name)
            if chosen == []:
                yield Problem(
                    f"{key}.{name}", f"an empty list drops nothing; null means all {name}."
                )
            for index in chosen or []:
                if not -count <= index < count:
                    message = f"{noun} {index} does not exist in a model of {count} {plural}."
                    yield Problem(f"{key}.{name}", message)


@configuration
class DropConfig(ChangeConfig):
    """When the encoding is dropped, what replaces it, and how training resumes."""

    enabled: bool = True
    """Drop as configured; false leaves out a drop that is set."""
    at: (
        Annotated[int, Field(strict=True, ge=-LARGEST, le=LARGEST)]
        | Annotated[Number, Field(le=LARGEST)]
        | None
    ) = None
    """When to drop: a step (0 only for trained weights), or a fraction of the run such as 0.85;
    null: never."""
    at_tokens: Count | None = None
    """When to drop, in tokens read; null: see at."""
    optimizer_state: Literal["keep", "reset", "reset_new"] = "reset"
    """State of the optimizer at the drop: keep, reset, or reset_new (only of parameters that the
    drop adds)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate from the drop to the end."""
    effect_sequences: Count = 64
    """Held-out sequences whose loss is measured before and after the drop."""

    def step(self, max_steps: int, tokens_per_step: int) -> int | None:
        """Return the number of steps trained before the drop, or None for never."""
        if not self.enabled:
            return None
        if self.at_tokens is not None:
            return -(-self.at_tokens // tokens_per_step)
        if isinstance(self.at, float):
            return round(self.at * max_steps)
        return self.at

    @listed
    def problems(
        self,
        max_steps: int,
        tokens_per_step: int,
        num_layers: int,
        num_heads: int,
        length: int,
        trained: bool = False,
    ) -> Iterator[Problem]:
        """Check the drop for a run of this length and shape.

        ``length``: tokens of a sequence. ``trained``: the run begins with trained weights, which
        may be dropped before the first step.
        """
        if self.at is not None and self.at_tokens is not None:
            yield Problem("drop", "give either drop.at or drop.at_tokens, not both.")
        step = self.step(max_steps, tokens_per_step)
        first = 0 if trained else 1
        if step is not None and not first <= step < max_steps:
            key = "at" if self.at_tokens is None else "at_tokens"
            if max_steps > first:
                message = (
                    f"{getattr(self, key)} is step {step}, but the run has steps {first} to "
                    f"{max_steps - 1} to drop at (trainer.max_steps is {max_steps}); give such a "
                    "step, a fraction between 0 and 1, or null for no drop."
                )
            else:
                message = (
                    "the run has a single step, and a drop needs one before it; give more steps "
                    "(trainer.max_steps or trainer.max_tokens), or drop=never."
                )
            yield Problem(f"drop.{key}", message)
        yield from self.change_problems("drop", num_layers, num_heads, length)
