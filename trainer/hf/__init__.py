"""The drop for models of transformers, in anybody's training loop.

:func:`drop_rotation` removes the rotary encoding of a model where it stands and
:func:`restore_rotation` puts it back; :class:`DropPositions` does so at a step of
``transformers.Trainer`` or a trainer derived from it. :func:`save_dropped_base` writes what an
adapter that was trained without rotation is loaded with. They need no other room of this package.
"""

from trainer.hf.adapters import save_dropped_base
from trainer.hf.callback import DropPositions
from trainer.hf.rotation import (
    NO_ROTATION,
    check_droppable,
    drop_rotation,
    is_dropped,
    restore_rotation,
)

__all__ = [
    "NO_ROTATION",
    "DropPositions",
    "check_droppable",
    "drop_rotation",
    "is_dropped",
    "restore_rotation",
    "save_dropped_base",
]
