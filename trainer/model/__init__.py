"""Decoder, attention, loss, key-value cache and generation; nothing here knows an encoding."""

from typing import TYPE_CHECKING, Any

from trainer.model.config import ModelConfig, QKNormConfig

if TYPE_CHECKING:
    from trainer.model.decoder import Decoder

__all__ = ["Decoder", "ModelConfig", "QKNormConfig"]


def __getattr__(name: str) -> Any:
    """Import the decoder on first use, so that reading a configuration does not import torch."""
    if name != "Decoder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.model.decoder import Decoder

    return Decoder
