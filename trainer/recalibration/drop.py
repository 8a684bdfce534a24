"""The drop: a pure function from one layout to another (DroPE, Sec. 5).

Dropping the encoding of every layer is the paper's method; other targets, chosen layers and heads
are the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from trainer.config import ChangeConfig
from trainer.positional.config import PositionalConfig, spectrum_of
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature

EVERYTHING = ChangeConfig()
"""Drop in all heads of all layers."""
NOPE = Spectrum()


def drop(
    layout: Layout,
    change: ChangeConfig = EVERYTHING,
    *,
    to: Spectrum = NOPE,
    qk_norm: bool = False,
) -> Layout:
    """Replace the chosen encodings, and the windows of all layers; return the new layout.

    ``to``: new spectrum of every chosen head. If it has no temperature, the head keeps one that
    acts within the training length, since its weights were trained with it. ``qk_norm``: also
    enable the query and key norms of these layers.

    Raises:
        ValueError: an index is out of range.
    """
    chosen = _indices(change.layers, len(layout.layers), "layer")

    def new(spectrum: Spectrum) -> Spectrum:
        return _as_warm(to, spectrum.temperature, layout.training_length)

    def changed(index: int, layer: LayerEncoding) -> LayerEncoding:
        if index in chosen:
            layer = replace(_of_heads(layer, change.heads, new), qk_norm=layer.qk_norm or qk_norm)
        if change.windows is None:
            return layer
        return replace(layer, window=change.windows[index % len(change.windows)])

    return replace(layout, layers=tuple(changed(*item) for item in enumerate(layout.layers)))


def dropped_layout(
    layout: Layout,
    positional: PositionalConfig,
    change: ChangeConfig,
    head_dim: int,
    qk_norm: bool = False,
) -> Layout:
    """Return the layout after the drop that the configuration asks for.

    ``qk_norm``: also enable the query and key norms of these layers.

    Raises:
        UserError: the new encoding is impossible for this model.
    """
    to = spectrum_of(positional, change.to, head_dim, layout.training_length)
    return drop(layout, change, to=to, qk_norm=qk_norm)


def _of_heads(
    layer: LayerEncoding,
    heads: Collection[int] | None,
    changed: Callable[[Spectrum], Spectrum],
) -> LayerEncoding:
    """Return the layer with the spectra of these key-value heads changed."""
    if heads is None:
        return layer.map(changed)
    chosen = _indices(heads, len(layer.spectra), "head")
    spectra = (changed(s) if i in chosen else s for i, s in enumerate(layer.spectra))
    groups = tuple((spectrum, 1) for spectrum in spectra)
    return replace(layer, groups=groups)


def _as_warm(to: Spectrum, before: Temperature, training_length: int) -> Spectrum:
    """Return ``to`` with the temperature ``before``, if weights were trained with it alone."""
    is_trained = before.scale != 1 or before.is_trained(training_length)
    if not is_trained or not to.temperature.is_none:
        return to
    return replace(to, temperature=before)


def _indices(chosen: Collection[int] | None, count: int, noun: str) -> set[int]:
    """Return indices counted from 0; all of them for None."""
    if chosen is None:
        return set(range(count))
    for index in chosen:
        if not -count <= index < count:
            kind = "layers" if noun == "layer" else "key-value heads"
            raise ValueError(f"{noun} {index} does not exist in a model of {count} {kind}")
    return {index % count for index in chosen}
