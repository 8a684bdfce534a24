"""What is impossible about the encodings of a run, before and after its drop."""

from __future__ import annotations

from trainer.errors import UserError
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, build_layout
from trainer.recalibration.config import DropConfig
from trainer.recalibration.drop import dropped_layout


def layout_problems(
    positional: PositionalConfig,
    model: ModelConfig,
    training_length: int,
    drop: DropConfig | None,
) -> list[str]:
    """One sentence for everything that keeps a layout from being made, or a drop from changing it.

    Args:
        positional: encodings that are registered.
        model: a shape without problems of its own.
        training_length: C, tokens.
        drop: one without problems of its own, to an encoding that is registered; None where there
            is none, or none of this layout.
    """
    try:
        layout = build_layout(
            positional,
            num_layers=model.num_hidden_layers,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_size,
            training_length=training_length,
        )
        if drop is None or dropped_layout(layout, positional, drop, model.head_size) != layout:
            return []
    except UserError as error:
        return list(error.problems)
    return [
        f"drop.to: {drop.to!r} is what the layers to drop have already, so that nothing would be "
        "dropped; choose another encoding, or drop=never."
    ]
