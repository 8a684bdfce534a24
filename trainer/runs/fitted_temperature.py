"""Softmax temperature fitted by an evaluation, stored beside a checkpoint's weights.

``temperature.json`` in the checkpoint's directory is no part of the training state and not listed
in the manifest. `generate` uses it; an evaluation fits its own.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.checkpoint import MANIFEST
from trainer.common.errors import UserError
from trainer.common.files import checksum, write_atomically
from trainer.common.formats import read_as
from trainer.positional.layout import Layout, layer_problems

log = logging.getLogger(__name__)

FILE = "temperature.json"
LARGEST_COEFFICIENT = 100
"""Largest coefficient of a grid, and thus of a fit; the papers' coefficients lie below 1."""


@dataclass(frozen=True)
class FittedTemperature:
    """Logits are multiplied by 1 + ``coefficient`` ln s, with s = max(n, C) / C (DroPE, App. C.2).

    ``training_length``: C (None, in files of earlier versions: the one in the checkpoint).
    ``weights``: checksum of the checkpoint's manifest (None, in files of earlier versions: any).
    ``per``: whether n is the length of the sequence or the number of keys a query sees.
    ``lengths``: sequence lengths of the fit, in tokens; ``text``: fingerprint of the fit's text,
    ``tokens`` its size. ``layers``: the layers that it tempers (None: all layers).
    """

    coefficient: Annotated[float, Field(ge=0, le=LARGEST_COEFFICIENT)]
    per: Literal["sequence", "query"]
    lengths: tuple[int, ...]
    text: str
    tokens: int
    layers: tuple[int, ...] | None = None
    training_length: int | None = None
    weights: str | None = None


def keep_temperature(checkpoint: Path, fitted: dict[str, Any]) -> float | None:
    """Store a fit with a checkpoint, unless the stored one was fitted on more text.

    Returns the coefficient of that better fit, or None if this one was stored.
    """
    path, weights = checkpoint / FILE, checksum(checkpoint / MANIFEST)
    with suppress(UserError):
        older = _read(path) if path.is_file() else None
        if older and older.weights in (None, weights) and older.tokens > fitted["tokens"]:
            return older.coefficient
    write_atomically(path, json.dumps({**fitted, "weights": weights}, indent=1) + "\n")
    return None


def with_fitted_temperature(
    layout: Layout, checkpoint: Path, stored_length: int | None = None
) -> tuple[Layout, str]:
    """Return the layout with the checkpoint's fitted temperature, and its description.

    The layout is returned unchanged without a stored temperature, with one of other weights, and if
    the model was trained with logits that depend on the length. ``stored_length``: the training
    length in the checkpoint, if the layout has another.

    Raises:
        UserError: the file is damaged.
    """
    path = checkpoint / FILE
    if not path.is_file():
        return layout, ""
    fitted = _read(path)
    if not fitted.coefficient or layout.has_trained_temperature:
        return layout, ""
    if fitted.weights is not None and fitted.weights != checksum(checkpoint / MANIFEST):
        log.warning("%s is not used: it was fitted on other weights than those beside it", path)
        return layout, ""
    layers = None if fitted.layers is None else [*fitted.layers]
    if unknown := layer_problems("layers", layers, len(layout.layers)):
        raise UserError.at("checkpoint", f"{str(path)!r}: {unknown[0]}")
    C = fitted.training_length or stored_length or layout.training_length
    changed = layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=fitted.coefficient,
            exponent=1.0,
            per=fitted.per,
            reference=None if layout.training_length == C else C,
            steps=False,
        ),
        layers,
    )
    words = f", logits times 1 + {fitted.coefficient:.3g} ln(n / {C}) beyond"
    if layers is not None:
        words += f" in layers {', '.join(map(str, layers))}"
    return changed, words


def _read(path: Path) -> FittedTemperature:
    try:
        return read_as(path, FittedTemperature)
    except ValueError as error:
        raise UserError.at(
            "checkpoint", f"{str(path)!r} holds no temperature ({error}); remove it to go without."
        ) from error
