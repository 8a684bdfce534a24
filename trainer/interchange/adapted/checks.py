"""Checks that a layer behaves as its layout says, so that no analysis reports a wrong number."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.interchange.adapted.rotation import Rotation, Tables, complex_table
from trainer.interchange.adapted.seam import Call
from trainer.model.masks import Mask, allowed
from trainer.positional.rotation import rotary_table

APART = 0.05
"""Between tables of cosines and those of the spectrum: the float32 phases of a model are off by so
much at position 10^6."""
LENGTHS = "analysis.length, or evaluation.choice.length and evaluation.lengths"
"""Keys of the texts that are watched."""


def check_scores(call: Call, window: int | None) -> None:
    """Check that the mask is causal, within the layer's window.

    Raises:
        UserError: the mask is another one.
    """
    if call.mask is None:
        return
    T, mask = call.q.shape[2], call.mask
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if not torch.equal(
        *torch.broadcast_tensors(seen, allowed(Mask(window), range(T), range(T), mask.device))
    ):
        raise UserError.at(
            "checkpoint",
            f"layer {call.index} hides other keys than a window would (attention in chunks), of "
            f"{T:,} tokens; give shorter texts ({LENGTHS}).",
        )


def check_rotation(call: Call, rotation: Rotation) -> None:
    """Check that the tables are those of the spectrum at the last position.

    Raises:
        UserError: the rotation depends on the length of the text.
    """
    if call.tables is not None:
        check_tables(call.index, call.tables, rotation, call.q.shape[2] - 1)


def check_tables(index: int, tables: Tables, rotation: Rotation, position: int) -> None:
    """Check one layer's tables at a given last position."""
    if not rotation.spectrum.rotates:
        return
    table = complex_table(tables)[1][0, -1]
    at = torch.tensor([position], device=table.device)
    cos, sin = (x[0] for x in rotary_table(rotation.spectrum, at))
    if (table - torch.complex(cos, sin)).abs().amax() > APART:
        raise UserError.at(
            "checkpoint",
            f"the rotation of layer {index} follows the length of the text; give texts within the "
            f"length it was trained at ({LENGTHS}).",
        )


def ends(positions: Tensor) -> tuple[int, int]:
    """Return the last position of the first row, and the last of all rows."""
    rows = positions.reshape(-1, positions.shape[-1])
    return int(rows[0, -1]), int(rows[:, -1].max())
