"""Helpers of methods that intervene on heads."""

from __future__ import annotations

from dataclasses import replace

from trainer.common.errors import UserError
from trainer.positional.layout import Intervention, LayerEncoding, Layout


def require_rotation(layout: Layout, key: str) -> None:
    """Check that some head rotates.

    Raises:
        UserError: none does; names ``key``.
    """
    if not layout.rotates:
        raise UserError.at(
            key, "expected a model with a rotary encoding, got one without rotation in any head."
        )


def with_intervention(encoding: LayerEncoding, intervention: Intervention) -> LayerEncoding:
    """Return the layer with an intervention on its heads.

    Raises:
        ValueError: it already has one.
    """
    if encoding.intervention is not None:
        raise ValueError("the layer has an intervention already; two on it do not combine")
    return replace(encoding, intervention=intervention)
