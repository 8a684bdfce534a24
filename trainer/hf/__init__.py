"""The drop for models of transformers, in anybody's training loop; needs ``common`` alone."""

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
