"""The drop: a pure function from one layout to another (DroPE, Sec. 5).

Dropping the encoding of every layer is the paper's method; other targets, chosen layers and heads
are the same function.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum

NOPE = Spectrum()


def drop(
    layout: Layout,
    to: Spectrum = NOPE,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    windows: Sequence[int | None] | None = None,
    qk_norm: bool = False,
) -> Layout:
    """Replace encodings by ``to``; return the new layout.

    ``layers``, ``heads``: indices of the layers, and of their key-value heads; None: all. If ``to``
    has no temperature, a head keeps one that acts within the training length, since its weights
    were trained with it. ``windows``: new windows of all layers, repeated over the depth; None:
    those before. ``qk_norm``: also enable the query and key norms of these layers.

    Raises:
        IndexError: an index is out of range.
    """
    chosen = _indices(layers, len(layout.layers))

    def new(spectrum: Spectrum) -> Spectrum:
        before = spectrum.temperature
        is_trained = before.scale != 1 or before.is_trained(layout.training_length)
        keeps = is_trained and to.temperature.is_none
        return replace(to, temperature=before) if keeps else to

    def changed(index: int, layer: LayerEncoding) -> LayerEncoding:
        if index in chosen:
            of = _indices(heads, len(layer.spectra))
            spectra = tuple(new(s) if head in of else s for head, s in enumerate(layer.spectra))
            layer = replace(layer, spectra=spectra, qk_norm=layer.qk_norm or qk_norm)
        if windows is None:
            return layer
        return replace(layer, window=windows[index % len(windows)])

    return replace(layout, layers=tuple(changed(*item) for item in enumerate(layout.layers)))


def _indices(chosen: Collection[int] | None, count: int) -> set[int]:
    """Return indices counted from 0; all of them for None."""
    return {range(count)[index] for index in (range(count) if chosen is None else chosen)}
