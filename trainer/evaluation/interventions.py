"""What interventions on heads share: a text is read with some layout, and layers get gains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from trainer.errors import UserError
from trainer.evaluation.layouts import rotates
from trainer.model.decoder import Decoder
from trainer.positional.gains import Gains
from trainer.positional.layout import LayerEncoding, Layout


@contextmanager
def reading_with(model: Decoder, layout: Layout) -> Iterator[None]:
    """Within it the model has that layout."""
    own = model.layout
    try:
        model.layout = layout
        yield
    finally:
        model.layout = own


def require_rotation(layout: Layout, key: str) -> None:
    """Raises UserError, which names ``key``, where no head rotates."""
    if not rotates(layout):
        raise UserError(
            f"{key}: expected a model with a rotary encoding, got one without rotation in any head."
        )


def with_gains(encoding: LayerEncoding, gains: Gains) -> LayerEncoding:
    """The layer with gains on its heads.

    Raises:
        ValueError: it has gains already.
    """
    if encoding.gains is not None:
        raise ValueError("the layer has gains already; two interventions on it do not combine")
    return replace(encoding, gains=gains)
