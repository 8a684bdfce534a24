"""The drop: a pure function from one layout to another (DroPE, Sec. 5).

Dropping the encoding of every layer is the paper's method; other targets, chosen layers, heads and
pairs, and a drop in small steps are the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from trainer.positional.config import PositionalConfig, spectrum_of
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Frequencies, Spectrum
from trainer.recalibration.config import ChangeConfig


def drop(
    layout: Layout,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    to: Spectrum | None = None,
    slower_than: float | None = None,
    faster_than: float | None = None,
    windows: Sequence[int | None] | None = None,
    qk_norm: bool = False,
) -> Layout:
    """Replace the encoding of some layers; return the new layout.

    Args:
        layout: present layout of the model.
        layers: indices, negative ones counted from the last; None for all.
        heads: key-value heads of these layers, counted likewise.
        to: new spectrum of every head; None for the empty one (NoPE).
        slower_than: instead of replacing the spectrum, set to zero the frequencies of pairs that
            take more tokens than this for a full turn.
        faster_than: likewise for pairs that take fewer tokens than this.
        windows: sliding windows of all layers, repeated over the depth; None keeps them.
        qk_norm: also enable the query and key norms of these layers.

    Raises:
        ValueError: an index is out of range.
    """
    target = to or Spectrum()

    def changed(spectrum: Spectrum) -> Spectrum:
        if slower_than is None and faster_than is None:
            return target
        return _without_pairs(spectrum, slower_than, faster_than)

    chosen = _indices(layers, len(layout.layers), "layer")
    layout = _with_windows(layout, windows)
    return replace(
        layout,
        layers=tuple(
            replace(_of_heads(layer, heads, changed), qk_norm=layer.qk_norm or qk_norm)
            if index in chosen
            else layer
            for index, layer in enumerate(layout.layers)
        ),
    )


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
        last = range(round(heads * remaining), heads)
        return drop(layout, layers=change.layers, heads=last, to=to)
    after = drop(layout, **_chosen(change), to=to)
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

    Args:
        layout: layout before the drop.
        positional: parameters of encodings.
        change: the configured drop; one in several steps has changed no encoding yet.
        head_dim: channels per head.
        qk_norm: also enable the query and key norms of these layers.

    Windows change immediately, even if the drop takes several steps.

    Raises:
        UserError: the new encoding is impossible for this model.
    """
    if change.anneal_steps:
        layout = _with_windows(layout, change.windows)
        chosen = _indices(change.layers, len(layout.layers), "layer")
        layers = (
            replace(layer, qk_norm=layer.qk_norm or (qk_norm and index in chosen))
            for index, layer in enumerate(layout.layers)
        )
        return replace(layout, layers=tuple(layers))
    to = spectrum_of(positional, change.to, head_dim, layout.training_length)
    return drop(layout, **_chosen(change), to=to, windows=change.windows, qk_norm=qk_norm)


def _with_windows(layout: Layout, windows: Sequence[int | None] | None) -> Layout:
    if windows is None:
        return layout
    layers = (
        replace(layer, window=windows[index % len(windows)])
        for index, layer in enumerate(layout.layers)
    )
    return replace(layout, layers=tuple(layers))


def _chosen(change: ChangeConfig) -> dict[str, Any]:
    return {key: getattr(change, key) for key in ("layers", "heads", "slower_than", "faster_than")}


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
