"""What methods are told, the same in every kind of evaluation; imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, field

from trainer.analysis.settings import USUAL
from trainer.common.errors import Problem, did_you_mean
from trainer.common.fields import Count, configuration
from trainer.evaluation.many_shot import LONG_TASKS
from trainer.evaluation.needles.tasks import NEEDLE_TASKS
from trainer.evaluation.settings import (
    ChoiceSettings,
    DopeSettings,
    DynamicNtkSettings,
    LongRopeSettings,
    TemperatureSettings,
    WeightedRopeSettings,
)
from trainer.positional.layout import LayerChoice, layer_problems
from trainer.positional.rescaling import RESCALINGS

METHODS = (
    *("none", "crop", "pi", "ntk", "dynamic_ntk", "yarn", "longrope"),
    *("dope", "weighted_rope", "temperature"),
)
BY_LAYER = (
    *RESCALINGS,
    *(f"dynamic_{name}" for name in RESCALINGS),
    *("dynamic_ntk_alpha", "longrope", "temperature", "temperature_rope_id"),
)
"""Parts that change the layers of ``evaluation.layers`` alone."""
PARTS = (
    *("none", "crop", "window"),
    *BY_LAYER,
    *("dope", "weighted_rope", "drop", "drop_channels"),
)
"""What ``evaluation.methods`` joins by ``+``."""

ON_TEXT = ("longrope", "temperature", "dope", "weighted_rope")
"""Parts that choose something on validation text."""

LAYERS_KEY = "evaluation.layers"
SHORTEST = {"sequence": 6, "spectrum": USUAL.frame}
"""Tokens that the entropies of ``evaluation.weighted_rope`` need."""


def choice_texts() -> tuple[str, ...]:
    """Return the names for ``evaluation.choice.text``, including those of plugins."""
    return ("validation", "file", *NEEDLE_TASKS, *LONG_TASKS)


@configuration
class MethodsConfig(ABC):
    """Methods and their settings, the same in every kind of evaluation."""

    _: KW_ONLY
    methods: list[str] | None = field(default_factory=lambda: ["none"])
    """Methods, several joined by + from left to right (yarn+dope); null: none, crop, pi, ntk,
    dynamic_ntk, yarn, longrope, dope, weighted_rope and temperature, if they change a
    checkpoint. Others: window, ntk_by_parts, yarn_full_range, llama3, ntk_by_parts_turns,
    yarn_turns, dynamic_..., dynamic_ntk_alpha, temperature_rope_id, drop, drop_channels."""
    fit_windows: Count = 32
    """Windows of validation text for what is fitted."""
    layers: LayerChoice = None
    """Layers that rescalings and temperatures change: all, full_attention (those without a
    window), or indices, [3,7]; null: the layers that see more than the training length."""
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    """Settings of temperature, 1 + c ln s with s the length in training lengths."""
    dynamic_ntk: DynamicNtkSettings = field(default_factory=DynamicNtkSettings)
    """Settings of dynamic_ntk_alpha."""
    longrope: LongRopeSettings = field(default_factory=LongRopeSettings)
    """Settings of longrope."""
    choice: ChoiceSettings = field(default_factory=ChoiceSettings)
    """What dope chooses heads on and weighted_rope pairs."""
    dope: DopeSettings = field(default_factory=DopeSettings)
    """Settings of dope."""
    weighted_rope: list[WeightedRopeSettings] = field(
        default_factory=lambda: [WeightedRopeSettings()]
    )
    """Rules of weighted_rope. The paper adds {entropy: spectrum, side: above, tau: 0.4, alpha:
    0.1}; +evaluation=weighted_rope has both."""

    @property
    @abstractmethod
    def factors(self) -> list[float]:
        """Extension factors that methods are set for."""

    @property
    def names(self) -> list[str]:
        """Requested methods."""
        return list(METHODS) if self.methods is None else self.methods

    @property
    def parts(self) -> list[str]:
        """Their parts, without duplicates."""
        return list(dict.fromkeys(part for name in self.names for part in name.split("+")))

    def method_problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if not self.names:
            found.append(Problem("evaluation.methods", "expected one or more, got none."))
        found += layer_problems(LAYERS_KEY, self.layers)
        intervenes = self.dope.removal == "zero" or self.dope.variant == "by_gaussian"
        for name in self.names:
            found += part_problems(name)
            if intervenes and {"dope", "weighted_rope"} <= {*name.split("+")}:
                found.append(
                    Problem(
                        "evaluation.methods",
                        f"in {name!r} both parts change the same heads, which does not combine; "
                        "name them one by one, or set evaluation.dope.removal=unrotate with "
                        "another variant than by_gaussian.",
                    )
                )
        if "weighted_rope" in self.parts and not self.weighted_rope:
            found.append(
                Problem("evaluation.weighted_rope", "expected one rule or more, got none.")
            )
        found += [
            *self.temperature.problems(),
            *self.longrope.problems(),
            *self.dope.problems(),
        ]
        return found + self.choice.problems(choice_texts())

    def choice_problems(self, training_length: int, methods: Sequence[str]) -> list[Problem]:
        """What these methods cannot choose on, for models of that training length."""
        parts = {part for name in methods for part in name.split("+")}
        rules = self.weighted_rope if "weighted_rope" in parts else ()
        found = []
        if self.temperature.lengths is not None and "temperature" in parts:
            found += [
                Problem(
                    "evaluation.temperature.lengths",
                    f"{length:g} times the training length of {training_length} tokens is no more "
                    "than that; nothing is fitted there.",
                )
                for length in self.temperature.lengths
                if round(length * training_length) <= training_length
            ]
        least = max((2, *(SHORTEST[rule.entropy] for rule in rules)))
        given = self.choice.length
        shortest = min(self.factors if given is None else [given])
        tokens = round(shortest * training_length)
        if parts & {"dope", "weighted_rope"} and tokens < least:
            found.append(
                Problem(
                    "evaluation.choice.length",
                    f"a text to choose on has {least:,} tokens or more, and {shortest:g} times "
                    f"the training length of {training_length} is {tokens}; here that is "
                    f"{least / training_length:.3g} or more.",
                )
            )
        return found


def part_problems(name: str) -> list[Problem]:
    """What is wrong with a method's name, one sentence each."""
    parts = name.split("+")
    found = [
        Problem("evaluation.methods", f"unknown method {part!r}.", did_you_mean(part, PARTS))
        for part in parts
        if part not in PARTS
    ]
    if len(set(parts)) < len(parts) or ("none" in parts and len(parts) > 1):
        found.append(
            Problem("evaluation.methods", f"{name!r} does one thing twice, or 'none' and more.")
        )
    return found
