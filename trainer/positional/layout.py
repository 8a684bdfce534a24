"""Which spectrum every layer and head has: uniform models, layer hybrids, head hybrids.

A layout is given per key-value head; the query heads that read a key-value head share its spectrum.
It travels with every checkpoint, as it is at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from trainer.positional.gains import Gains
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class LayerEncoding:
    """What happens to queries and keys of one layer between projection and scores.

    ``spectra``: one for every key-value head. ``window``: how many keys a query sees, itself
    included (None: all before it). ``qk_norm``: whether the layer's query and key norms are on.
    ``gains``: an intervention on its heads, for an evaluation.
    """

    spectra: tuple[Spectrum, ...]
    window: int | None = None
    qk_norm: bool = False
    gains: Gains | None = None

    @cached_property
    def groups(self) -> tuple[tuple[Spectrum, int], ...]:
        """Neighbouring heads with the same spectrum: (spectrum, number of key-value heads)."""
        return tuple((spectrum, len(list(heads))) for spectrum, heads in groupby(self.spectra))

    def map(self, change: Callable[[Spectrum], Spectrum]) -> LayerEncoding:
        """The layer with every spectrum replaced by ``change(spectrum)``."""
        return replace(self, spectra=tuple(change(spectrum) for spectrum in self.spectra))


@dataclass(frozen=True)
class Layout:
    """The encodings of all layers, from the first to the last."""

    layers: tuple[LayerEncoding, ...]

    @property
    def training_length(self) -> int:
        """C, the length in tokens that the model was trained at."""
        return self.layers[0].spectra[0].training_length

    @property
    def spectra(self) -> tuple[Spectrum, ...]:
        """The distinct spectra, in order of first appearance."""
        return tuple(dict.fromkeys(s for layer in self.layers for s in layer.spectra))

    def map(self, change: Callable[[Spectrum], Spectrum]) -> Layout:
        """The layout with every spectrum replaced by ``change(spectrum)``."""
        return Layout(tuple(layer.map(change) for layer in self.layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and checkpoints; each distinct spectrum is written once.

        Raises:
            ValueError: there are gains, which are never stored.
        """
        if any(layer.gains is not None for layer in self.layers):
            raise ValueError("a layout with gains on its heads is for an evaluation, not to store")
        index = {spectrum: i for i, spectrum in enumerate(self.spectra)}
        return {
            "spectra": [spectrum.to_dict() for spectrum in self.spectra],
            "layers": [
                {
                    "heads": [index[spectrum] for spectrum in layer.spectra],
                    "window": layer.window,
                    "qk_norm": layer.qk_norm,
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Layout:
        """The inverse of :meth:`to_dict`."""
        spectra = [Spectrum.from_dict(spectrum) for spectrum in values["spectra"]]
        return cls(
            tuple(
                LayerEncoding(
                    tuple(spectra[i] for i in layer["heads"]), layer["window"], layer["qk_norm"]
                )
                for layer in values["layers"]
            )
        )
