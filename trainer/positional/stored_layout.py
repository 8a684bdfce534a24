"""Check layouts from a file, which may be damaged or untrusted, before they are used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from trainer.common.fields import adapter
from trainer.common.formats import first_problem
from trainer.positional.layout import Layout, from_first_format
from trainer.positional.spectrum import Spectrum

Length = Annotated[int, Field(ge=1, lt=1 << 31)]
"""Length of sequences, in tokens."""
Index = Annotated[int, Field(ge=0, lt=1 << 20)]


@dataclass(frozen=True)
class StoredLayer:
    """Layer of a stored layout; groups are (index of a spectrum, number of key-value heads)."""

    groups: list[tuple[Index, Annotated[int, Field(ge=1, lt=1 << 20)]]]
    window: Length | None
    qk_norm: bool


@dataclass(frozen=True)
class StoredLayout:
    """Layout as :meth:`Layout.to_dict` writes it."""

    training_length: Length
    spectra: list[Spectrum]
    layers: list[StoredLayer]


def in_todays_form(values: Any) -> dict[str, Any]:
    """Convert stored values to today's format.

    Raises:
        ValueError: they are not a layout.
    """
    if not isinstance(values, dict):
        raise ValueError("layout: expected the encodings of all layers")
    try:
        return from_first_format(values)
    except KeyError as error:
        raise ValueError(f"layout: {error} is missing") from None
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"layout: {error}") from None


def read_layout(values: Any, layers: int, heads: int, head_size: int) -> Layout:
    """Read the stored layout of a model with ``layers`` layers, ``heads`` key-value heads in each
    and ``head_size`` channels per head.

    Raises:
        ValueError: it is damaged or does not fit the model; the message is one line.
    """
    values = in_todays_form(values)
    try:
        stored: StoredLayout = adapter(StoredLayout).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ValueError(f"layout.{first_problem(error)}") from None
    if len(stored.layers) != layers:
        raise ValueError(f"layout: {len(stored.layers)} layers for {layers} of the model")
    for layer in stored.layers:
        if sum(count for _, count in layer.groups) != heads:
            raise ValueError("layout: a layer has other key-value heads than the model")
        if any(index >= len(stored.spectra) for index, _ in layer.groups):
            raise ValueError("layout: a layer names a spectrum that is not there")
    for spectrum in stored.spectra:
        _check_spectrum(spectrum, head_size)
    return Layout.from_dict(values)


def _check_spectrum(spectrum: Spectrum, head_size: int) -> None:
    long = spectrum.long
    for reference in (spectrum.temperature.reference, None if long is None else long.reference):
        if reference is not None and reference < 1:
            raise ValueError(f"layout: a spectrum refers to a length of {reference} tokens")
    if spectrum.rotary_dim > head_size:
        raise ValueError(f"layout: {spectrum.rotary_dim} of {head_size} channels rotate")
    if long is not None:
        stretch = long.stretch
        counted = (long.inv_freq, *((stretch.kept, stretch.power) if stretch else ()))
        if any(len(numbers) != len(spectrum.inv_freq) for numbers in counted):
            raise ValueError("layout: a spectrum has other frequencies for long sequences")
