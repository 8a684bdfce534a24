"""Checks of a run's encodings, before and after its drops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainer.common.errors import Problem, UserError
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, build_layout
from trainer.recalibration.config import ChangeConfig
from trainer.recalibration.drop import dropped_layout


def layout_problems(
    positional: PositionalConfig,
    model: ModelConfig,
    training_length: int,
    drops: Mapping[str, ChangeConfig],
) -> list[Problem]:
    """Check that the layout can be made and that each drop changes it.

    Args:
        positional: encodings that are registered.
        model: a valid model configuration.
        training_length: C, in tokens.
        drops: valid drops by their configuration keys, applied one after the other.
    """
    try:
        layout = build_layout(
            positional,
            num_layers=model.num_hidden_layers,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_size,
            training_length=training_length,
        )
        for key, drop in drops.items():
            if drop.anneal_steps and not layout.rotates:
                return [
                    Problem(
                        f"{key}.anneal_steps", "nothing rotates, so that no angle could shrink."
                    )
                ]
            at_once = replace(drop, anneal_steps=0)
            before, layout = layout, dropped_layout(layout, positional, at_once, model.head_size)
            if layout == before:
                return [_without_effect(key, drop)]
    except UserError as error:
        return list(error.problems)
    return []


def _without_effect(key: str, drop: ChangeConfig) -> Problem:
    if drop.of_pairs:
        return Problem(key, f"nothing{drop.of_what} rotates, so that nothing would be dropped.")
    return Problem(
        f"{key}.to",
        f"{drop.to!r} is what the layers to drop have already, so that nothing would be "
        "dropped; choose another encoding, or no drop.",
    )
