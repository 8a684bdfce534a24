"""The softmax temperature that an evaluation fitted for a checkpoint, kept beside its weights.

``temperature.json`` in the checkpoint's directory; no part of what was trained, and not listed in
its manifest. Generation uses it, evaluation has it as a method of its own.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.common.errors import UserError
from trainer.formats import read_as
from trainer.positional.layout import Layout
from trainer.report.atomic import write_atomically

FILE = "temperature.json"
LARGEST_COEFFICIENT = 100
"""Of a grid, and so of what is fitted on it; those of the papers lie below 1."""


@dataclass(frozen=True)
class FittedTemperature:
    """Logits are multiplied by 1 + ``coefficient`` ln s, s = max(n, C) / C (DroPE, App. C.2).

    ``per``: whether n is the length of the sequence or what each query sees. ``lengths``: tokens it
    was fitted at; ``text``: fingerprint of what it was fitted on, ``tokens`` of it.
    """

    coefficient: Annotated[float, Field(ge=0, le=LARGEST_COEFFICIENT)]
    per: Literal["sequence", "query"]
    lengths: tuple[int, ...]
    text: str
    tokens: int


def keep_temperature(checkpoint: Path, fitted: dict[str, Any]) -> float | None:
    """Write what was fitted into the directory of a checkpoint, unless what is there, and can be
    read, was fitted on more text: then return its coefficient."""
    path = checkpoint / FILE
    with suppress(UserError):
        if path.is_file() and (older := _read(path)).tokens > fitted["tokens"]:
            return older.coefficient
    write_atomically(path, json.dumps(fitted, indent=1) + "\n")
    return None


def with_fitted_temperature(layout: Layout, checkpoint: Path) -> tuple[Layout, str]:
    """The layout with the temperature kept with a checkpoint, and what that is in words; as it is
    where there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = checkpoint / FILE
    if not path.is_file():
        return layout, ""
    fitted = _read(path)
    if not fitted.coefficient:
        return layout, ""
    changed = layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=fitted.coefficient, exponent=1.0, per=fitted.per
        )
    )
    words = f", logits times 1 + {fitted.coefficient:.3g} ln(n / {layout.training_length}) beyond"
    return changed, words


def _read(path: Path) -> FittedTemperature:
    try:
        return read_as(path, FittedTemperature)
    except ValueError as error:
        raise UserError.at(
            "checkpoint", f"{str(path)!r} holds no temperature ({error}); remove it to go without."
        ) from error
