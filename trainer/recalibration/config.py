"""The ``drop`` configuration group: what is dropped, when, and how training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.common.errors import Problem
from trainer.recalibration.schedule import ScheduleConfig


@dataclass(frozen=True)
class ChangeConfig:
    """What is dropped, and what replaces it.

    ``layers``: indices, null for all. ``heads``: of these layers only such key-value heads, null
    for all. ``slower_than``, ``faster_than``: of these heads only pairs that take more, or fewer,
    than so many tokens to turn once; with both, those of either kind. ``to``: the encoding that
    replaces it. ``anneal_steps``: 0 is at once; else it shrinks to nothing over so many steps, as
    ``anneal`` says: the ``angles`` of all pairs, or the share of ``heads`` of every layer that
    still rotate. ``qk_norm_gain``: where QK-norm comes on at the drop, its gain is 1 or matched to
    the RMS that queries and keys have on the effect batch.
    """

    layers: list[int] | None = None
    heads: list[int] | None = None
    slower_than: float | None = None
    faster_than: float | None = None
    to: str = "nope"
    anneal_steps: int = 0
    anneal: Literal["angles", "heads"] = "angles"
    qk_norm_gain: Literal["one", "matched"] = "one"

    @property
    def of_pairs(self) -> bool:
        """Whether some pairs of a head may be dropped, and others not."""
        return self.slower_than is not None or self.faster_than is not None

    @property
    def of_what(self) -> str:
        """The choice in words, ``" of layers 0, 1"``; empty for all."""
        found = [
            f"{name} {', '.join(map(str, chosen))}"
            for name in ("layers", "heads")
            if (chosen := getattr(self, name)) is not None
        ]
        pairs = [
            f"{than} than {value:g} tokens a turn"
            for than, value in (("slower", self.slower_than), ("faster", self.faster_than))
            if value is not None
        ]
        found += [f"pairs {' or '.join(pairs)}"] if pairs else []
        return f" of {', '.join(found)}" if found else ""

    def change_problems(
        self, key: str, num_layers: int, num_heads: int, steps: int
    ) -> list[Problem]:
        """What is impossible in a model of so many layers and key-value heads, one sentence each;
        ``key``: where the group stands; ``steps``: that are left."""
        found = []
        for name, count, what in (("layers", num_layers, "layer"), ("heads", num_heads, "head")):
            chosen = getattr(self, name)
            if chosen == []:
                found.append(
                    Problem(f"{key}.{name}", f"an empty list drops nothing; null means all {name}.")
                )
            found += [
                Problem(
                    f"{key}.{name}",
                    f"{what} {i} does not exist in a model of {count} "
                    f"{'layers' if name == 'layers' else 'key-value heads'}.",
                )
                for i in chosen or []
                if not -count <= i < count
            ]
        for name in ("slower_than", "faster_than"):
            if (value := getattr(self, name)) is not None and not value > 0:
                found.append(Problem(f"{key}.{name}", f"expected a number of tokens, got {value}."))
        slower, faster = self.slower_than, self.faster_than
        if slower is not None and faster is not None and slower < faster:
            found.append(
                Problem(
                    f"{key}.slower_than",
                    f"pairs slower than {slower:g} or faster than {faster:g} are all; give one of "
                    "them, or a slower_than above faster_than.",
                )
            )
        if self.to != "nope" and (self.of_pairs or self.anneal_steps):
            found.append(
                Problem(
                    f"{key}.to",
                    "pairs, and what shrinks over steps, are dropped to nope alone, got "
                    f"{self.to!r}.",
                )
            )
        if not 0 <= self.anneal_steps <= steps:
            found.append(
                Problem(
                    f"{key}.anneal_steps",
                    f"expected 0 to {steps}, the steps that are left, got {self.anneal_steps}.",
                )
            )
        if self.anneal == "heads" and self.anneal_steps and (self.heads or self.of_pairs):
            found.append(
                Problem(f"{key}.anneal", "'heads' goes through all heads; leave out the choice.")
            )
        return found


@dataclass(frozen=True)
class DropConfig(ChangeConfig):
    """When the encoding is dropped, what replaces it, and how training goes on.

    ``at``: a step (integer; 0 only for pretrained weights) or a fraction of the run (0.85);
    ``at_tokens``: the first step by which so many tokens were seen; both null: never. ``enabled``:
    false leaves out a drop that is set. ``optimizer_state``: keep, reset, or reset for the new
    parameters only. ``schedule``: the learning rate from the drop to the end.
    ``effect_sequences``: size of the fixed held-out batch whose loss is reported before and after.
    """

    enabled: bool = True
    at: int | float | None = None
    at_tokens: int | None = None
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
        self,
        max_steps: int,
        tokens_per_step: int,
        num_layers: int,
        num_heads: int,
        trained: bool = False,
    ) -> list[Problem]:
        """What is impossible for a run of that length and shape, one sentence each.

        ``trained``: the run begins with trained weights, which may drop before the first step.
        """
        found = self.schedule.problems("drop.schedule")
        if self.at is not None and self.at_tokens is not None:
            found.append(Problem("drop", "give either drop.at or drop.at_tokens, not both."))
        step = self.step(max_steps, tokens_per_step)
        first = 0 if trained else 1
        if step is not None and not first <= step < max_steps:
            key = "at" if self.at_tokens is None else "at_tokens"
            found.append(
                Problem(
                    f"drop.{key}",
                    f"{getattr(self, key)} is step {step}, but the run has steps {first} to "
                    f"{max_steps - 1} to drop at (trainer.max_steps is {max_steps}); give such a "
                    "step, a fraction between 0 and 1, or null for no drop.",
                )
            )
            step = None
        left = max_steps - step if step is not None else max_steps
        found += self.change_problems("drop", num_layers, num_heads, left)
        if self.effect_sequences < 1:
            found.append(
                Problem(
                    "drop.effect_sequences", f"expected 1 or more, got {self.effect_sequences}."
                )
            )
        return found
