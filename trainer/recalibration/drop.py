"""The drop: a pure function from one layout to another (DroPE, Sec. 5).

Dropping the encoding of every layer is the paper's method; other targets, chosen layers, heads and
pairs, and a drop in small steps are the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from trainer.positional.config import PositionalConfig, spectrum_of
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Frequencies, Spectrum, Temperature
from trainer.recalibration.config import ChangeConfig

EVERYTHING = ChangeConfig()
"""Drop of all pairs in all heads of all layers at once."""
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
    acts within the training length, since its weights were trained with it. If only some pairs are
    chosen, their frequencies are set to zero instead. ``qk_norm``: also enable the query and key
    norms of these layers.

    Raises:
        ValueError: an index is out of range.
    """

    def changed(spectrum: Spectrum) -> Spectrum:
        if not change.of_pairs:
            return _as_warm(to, spectrum.temperature, layout.training_length)
        return _without_pairs(spectrum, change.slower_than, change.faster_than)

    return _changed(layout, change, changed, qk_norm)


def _changed(
    layout: Layout, change: ChangeConfig, new: Callable[[Spectrum], Spectrum], qk_norm: bool
) -> Layout:
    """Return the layout with ``new`` spectra of the chosen heads, norms and windows."""
    chosen = _indices(change.layers, len(layout.layers), "layer")

    def changed(index: int, layer: LayerEncoding) -> LayerEncoding:
        if index in chosen:
            layer = replace(_of_heads(layer, change.heads, new), qk_norm=layer.qk_norm or qk_norm)
        if change.windows is None:
            return layer
        return replace(layer, window=change.windows[index % len(change.windows)])

    return replace(layout, layers=tuple(changed(*item) for item in enumerate(layout.layers)))


def shrunk(
    layout: Layout, positional: PositionalConfig, change: ChangeConfig, head_dim: int, done: int
) -> Layout:
    """Return ``layout`` after ``done`` steps of a drop that takes ``change.anneal_steps``.

    Angles shrink to zero linearly. Heads drop one after the other, the last head first. After the
    last step the layout equals that of a drop in one step.
    """
    remaining = max(1 - done / change.anneal_steps, 0.0)
    to = spectrum_of(positional, change.to, head_dim, layout.training_length)
    if change.anneal == "heads":
        heads = len(layout.layers[0].spectra)
        last = list(range(round(heads * remaining), heads))
        return drop(layout, replace(change, heads=last), to=to)
    after = drop(layout, change, to=to)
    if not remaining:
        return after

    def slowed(before: LayerEncoding, after: LayerEncoding) -> LayerEncoding:
        pairs = zip(before.spectra, after.spectra, strict=True)
        return replace(before, groups=tuple((_between(a, b, remaining), 1) for a, b in pairs))

    layers = map(slowed, layout.layers, after.layers)
    return replace(layout, layers=tuple(layers))


def dropped_layout(
    layout: Layout,
    positional: PositionalConfig,
    change: ChangeConfig,
    head_dim: int,
    qk_norm: bool = False,
) -> Layout:
    """Return the layout directly after the drop that the configuration asks for.

    A drop in several steps has changed windows, but no encoding yet. ``qk_norm``: also enable the
    query and key norms of these layers.

    Raises:
        UserError: the new encoding is impossible for this model.
    """
    if change.anneal_steps:
        return _changed(layout, change, lambda spectrum: spectrum, qk_norm)
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


def _without_pairs(spectrum: Spectrum, slower: float | None, faster: float | None) -> Spectrum:
    """Set the frequencies of slow or fast pairs to zero; return an empty spectrum if all are."""
    stops = [
        (slower is not None and turn > slower) or (faster is not None and turn < faster)
        for turn in spectrum.wavelengths
    ]
    changed = _times(spectrum, [0.0 if stop else 1.0 for stop in stops])
    if changed.rotates:
        return changed
    return replace(changed, inv_freq=(), long=None, rotary_scale=1.0)


def _between(before: Spectrum, after: Spectrum, share: float) -> Spectrum:
    """Scale the angles that ``after`` sets to zero to a share of those in ``before``.

    The factor on rotated channels falls by the same share, to 1 if nothing rotates in ``after``.
    """
    dropped = after.inv_freq or (0.0,) * len(before.inv_freq)
    pairs = zip(before.inv_freq, dropped, strict=True)
    scale = after.rotary_scale + share * (before.rotary_scale - after.rotary_scale)
    slowed = _times(before, [1.0 if old == new else share for old, new in pairs])
    return replace(slowed, rotary_scale=scale)


def _times(spectrum: Spectrum, factors: Sequence[float]) -> Spectrum:
    """Multiply each pair's frequency by a factor, also those for long sequences."""

    def scaled(inv_freq: Frequencies) -> Frequencies:
        return tuple(f * factor for f, factor in zip(inv_freq, factors, strict=True))

    long = spectrum.long
    return replace(
        spectrum,
        inv_freq=scaled(spectrum.inv_freq),
        long=long and replace(long, inv_freq=scaled(long.inv_freq)),
    )


def _indices(chosen: Collection[int] | None, count: int, noun: str) -> set[int]:
    """Return indices counted from 0; all of them for None."""
    if chosen is None:
        return set(range(count))
    for index in chosen:
        if not -count <= index < count:
            kind = "layers" if noun == "layer" else "key-value heads"
            raise ValueError(f"{noun} {index} does not exist in a model of {count} {kind}")
    return {index % count for index in chosen}
