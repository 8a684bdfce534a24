"""What methods that intervene on heads share."""

from __future__ import annotations

from dataclasses import replace

from trainer.errors import UserError
from trainer.positional.layout import Intervention, LayerEncoding, Layout


def require_rotation(layout: Layout, key: str) -> None:
    """Raises UserError, which names ``key``, where no head rotates."""
    if not layout.rotates:
        raise UserError(
            f"{key}: expected a model with a rotary encoding, got one without rotation in any head."
        )


def with_intervention(encoding: LayerEncoding, intervention: Intervention) -> LayerEncoding:
    """The layer with an intervention on its heads.

    Raises:
        ValueError: it has one already.
    """
    if encoding.intervention is not None:
        raise ValueError("the layer has an intervention already; two on it do not combine")
    return replace(encoding, intervention=intervention)
