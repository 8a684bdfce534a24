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

from trainer.common.errors import UserError
from trainer.common.files import checksum, write_atomically
from trainer.common.formats import read_as
from trainer.positional.layout import Layout, layer_problems
from trainer.runs.checkpoints import MANIFEST

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
    ``heads``: a coefficient for every query head of ``layers``, ``[layers][Hq]``, in place of
    ``coefficient``, which is their mean (HeadScale, arXiv 2404.12224); None: the same for all.
    """

    coefficient: Annotated[float, Field(ge=0, le=LARGEST_COEFFICIENT)]
    per: Literal["sequence", "query"]
    lengths: tuple[int, ...]
    text: str
    tokens: int
    layers: tuple[int, ...] | None = None
    heads: tuple[tuple[Annotated[float, Field(ge=0, le=LARGEST_COEFFICIENT)], ...], ...] | None = (
        None
    )
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
    if fitted.heads is not None:
        return _by_head(layout, fitted, path, C)
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


def _by_head(
    layout: Layout, fitted: FittedTemperature, path: Path, reference: int
) -> tuple[Layout, str]:
    assert fitted.heads is not None
    layers = range(len(layout.layers)) if fitted.layers is None else fitted.layers
    sizes = {len(layout.layers[index].spectra) for index in layers}
    rests = {len(row) % size for row in fitted.heads for size in sizes}
    lengths = {*map(len, fitted.heads)}
    if len(fitted.heads) != len(layers) or rests != {0} or len(lengths) != 1 or 0 in lengths:
        raise UserError.at("checkpoint", f"{str(path)!r}: heads are not those of the model.")
    changed = layout.with_training_length(reference).tempered_by_head(fitted.heads, layers)
    changed = changed.with_training_length(layout.training_length)
    words = f", logits of each head times 1 + c ln(n / {reference}) beyond"
    words += f", c {fitted.coefficient:.3g} on average"
    if len(layers) < len(layout.layers):
        words += f" in layers {', '.join(map(str, layers))}"
    return changed, words


def _read(path: Path) -> FittedTemperature:
    try:
        return read_as(path, FittedTemperature)
    except ValueError as error:
        raise UserError.at(
            "checkpoint", f"{str(path)!r} holds no temperature ({error}); remove it to go without."
        ) from error
