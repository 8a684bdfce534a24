"""The spectrum of every layer and head: uniform models, layer hybrids, head hybrids; and the drop.

A layout assigns spectra to key-value heads; the query heads that read a key-value head share its
spectrum. An evaluation may assign a spectrum to every query head of a layer: each then has a copy
of its keys. Every checkpoint stores the layout of its time.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any, Literal, Self

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.positional.rescaling import Rescaling, dynamic, rescaled
from trainer.positional.spectrum import Spectrum

LayerChoice = Literal["all"] | list[int] | None
"""Layers that an extension changes: all, or indices, where negative ones count from the last. None:
the layers that see more than C keys, since a window within C meets no distance that was not
trained."""
NOPE = Spectrum()
Factors = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Intervention:
    """Change of a layer's encoded queries and keys: factors on channels, and noise (DoPE; Weighted
    RoPE).

    ``query``, ``key``: a factor for every channel of every head, ``[Hq][D]`` and ``[Hkv][D]``, or
    ``[Hq][D]`` for both in a layer with a spectrum for every query head; empty: all 1.
    ``query_noise``, ``key_noise``: standard deviation of the Gaussian noise added to every channel
    of a head, one number per head; empty: no noise. The noise is a fixed function of ``seed``, head
    and position.

    A rotated pair shares one factor, so that the factor before the rotation equals one after it.
    Evaluations set interventions; checkpoints never store them.
    """

    query: Factors = ()
    key: Factors = ()
    query_noise: tuple[float, ...] = ()
    key_noise: tuple[float, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class LayerEncoding:
    """Encoding of a layer's queries and keys, between projection and scores.

    ``spectra``: of every key-value head, or of every query head. ``window``: number of keys that a
    query sees, itself included (None: all before it). ``qk_norm``: whether the layer's query and
    key norms are on. ``intervention``: change of the encoded queries and keys, for an evaluation.
    """

    spectra: tuple[Spectrum, ...]
    window: int | None = None
    qk_norm: bool = False
    intervention: Intervention | None = None

    @cached_property
    def groups(self) -> tuple[tuple[Spectrum, int], ...]:
        """Spectra of neighbouring heads that share one, and the number of these heads."""
        return tuple((spectrum, len([*heads])) for spectrum, heads in groupby(self.spectra))

    @cached_property
    def biased(self) -> tuple[bool, ...]:
        """Whether each head has ALiBi's bias."""
        return tuple(spectrum.alibi for spectrum in self.spectra)

    def expanded(self, query_heads: int) -> Self:
        """Return the layer with a spectrum for every query head."""
        queries_per_key = query_heads // len(self.spectra)

        def repeated(heads: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(head for head in heads for _ in range(queries_per_key))

        change = self.intervention
        if change is not None:
            change = replace(change, key=repeated(change.key), key_noise=repeated(change.key_noise))
        return replace(self, spectra=repeated(self.spectra), intervention=change)

    def with_intervention(self, intervention: Intervention) -> Self:
        """Return the layer with an intervention; raise a ValueError if it already has one."""
        if self.intervention is not None:
            raise ValueError("the layer has an intervention already; two on it do not combine")
        return replace(self, intervention=intervention)


@dataclass(frozen=True)
class Layout:
    """Encodings of all layers, from the first to the last.

    ``training_length``: C, the length in tokens that the model was trained at. ``reach``: tokens
    that the rescaling of a published model already reaches, if more than C; every further rescaling
    is the identity up to there.
    """

    training_length: int
    layers: tuple[LayerEncoding, ...]
    reach: int = 0

    @cached_property
    def distinct(self) -> dict[LayerEncoding, list[int]]:
        """Distinct layers, in order of first appearance, and the indices of each."""
        indices: dict[LayerEncoding, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(layer, []).append(index)
        return indices

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """Distinct spectra, in order of first appearance."""
        return tuple(dict.fromkeys(s for layer in self.distinct for s, _ in layer.groups))

    @cached_property
    def follows_length(self) -> bool:
        """Whether :meth:`at` depends on the length."""
        return any(spectrum.follows_length for spectrum in self.spectra)

    @property
    def rotates(self) -> bool:
        """Whether any head rotates."""
        return any(spectrum.rotates for spectrum in self.spectra)

    @property
    def longest(self) -> int:
        """Longest sequence in tokens that needs no further rescaling: C, or the ``reach``."""
        return max(self.training_length, self.reach) if self.rotates else self.training_length

    @property
    def switches(self) -> set[int]:
        """Lengths beyond which all tokens have other frequencies at once (LongRoPE)."""
        return {s.long.length for s in self.spectra if s.long and s.long.inv_freq != s.inv_freq}

    def at(self, length: int) -> Self:
        """Return the layout at ``length`` tokens, with fixed frequencies and temperatures."""
        if not self.follows_length:
            return self
        return self.map(lambda spectrum: spectrum.at(length, self.training_length))

    def with_training_length(self, length: int) -> Self:
        """Return the layout with another C, for a model that computes the same as before.

        Temperatures that grew from the previous C keep it as their reference.
        """
        if length == self.training_length:
            return self

        def with_reference(spectrum: Spectrum) -> Spectrum:
            temperature = spectrum.temperature
            if temperature.is_constant or temperature.reference is not None:
                return spectrum
            return spectrum.with_temperature(reference=self.training_length)

        return replace(self.map(with_reference), training_length=length)

    def map(self, change: Callable[[Spectrum], Spectrum], layers: LayerChoice = "all") -> Self:
        """Replace every spectrum of ``layers`` by ``change(spectrum)``; return the new layout."""
        changed = cache(change)
        new = list(self.layers)
        for index in self.chosen(layers):
            new[index] = replace(new[index], spectra=tuple(map(changed, new[index].spectra)))
        return replace(self, layers=tuple(new))

    def chosen(self, layers: LayerChoice, key: str = "layers") -> list[int]:
        """Return the indices from 0 on of the layers that an extension changes; raise a UserError
        about ``key`` if a layer does not exist."""
        if layers is not None:
            return _indices(key, None if layers == "all" else layers, len(self.layers))
        windows = [layer.window or math.inf for layer in self.layers]
        return [index for index, window in enumerate(windows) if window > self.training_length]

    def of_layers(self, layers: LayerChoice) -> Self:
        """Return the layout of these layers alone."""
        return replace(self, layers=tuple(self.layers[index] for index in self.chosen(layers)))

    def rescaled(self, rescaling: Rescaling, factor: float, layers: LayerChoice = None) -> Self:
        """Slow the rotations of ``layers`` for sequences ``factor`` times the training length."""
        start = self.longest
        if start != self.training_length:
            factor = max(1.0, factor * self.training_length / start)
        return self.map(lambda s: rescaled(s, rescaling, start, factor), layers)

    def dynamically_rescaled(
        self, rescaling: Rescaling, growth: float = 1.0, layers: LayerChoice = None
    ) -> Self:
        """Slow the rotations of ``layers`` with the sequence's length, ``growth`` times as fast."""
        start = self.longest
        return self.map(lambda s: dynamic(s, rescaling, start, growth), layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and checkpoints, without interventions; each distinct
        spectrum is written once."""
        index = {spectrum: i for i, spectrum in enumerate(self.spectra)}
        layers = []
        for layer in self.layers:
            groups = [[index[spectrum], heads] for spectrum, heads in layer.groups]
            layers.append({"groups": groups, "window": layer.window, "qk_norm": layer.qk_norm})
        return {
            "training_length": self.training_length,
            "reach": self.reach,
            "spectra": [asdict(spectrum) for spectrum in self.spectra],
            "layers": layers,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a layout from values of :meth:`to_dict`."""
        spectra = adapter(list[Spectrum]).validate_python(values["spectra"])
        layers = []
        for layer in values["layers"]:
            of_heads: list[Spectrum] = []
            for index, heads in layer["groups"]:
                of_heads += [spectra[index]] * heads
            layers.append(LayerEncoding(tuple(of_heads), layer["window"], layer["qk_norm"]))
        return cls(values["training_length"], tuple(layers), values["reach"])


def uniform(
    spectrum: Spectrum,
    *,
    layers: int,
    heads: int,
    training_length: int,
    window: int | None = None,
    qk_norm: bool = False,
) -> Layout:
    """Return the layout of a model whose ``heads`` key-value heads share one encoding.

    ``window``, ``qk_norm``: see :class:`LayerEncoding`.
    """
    layer = LayerEncoding((spectrum,) * heads, window, qk_norm)
    return Layout(training_length, (layer,) * layers)


def drop(
    layout: Layout,
    to: Spectrum = NOPE,
    key: str = "drop",
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    windows: Sequence[int | None] | None = None,
    qk_norm: bool = False,
) -> Layout:
    """Replace encodings by ``to``; return the new layout (DroPE, Sec. 5).

    ``layers``, ``heads``: indices of the layers, and of their key-value heads; None: all, which is
    the paper's method. If ``to`` has no temperature, a head keeps one that acts within the training
    length, since its weights were trained with it. ``windows``: new windows of all layers, repeated
    over the depth; None: those before. ``qk_norm``: also enable the query and key norms of these
    layers. Raises a UserError about ``key`` if an index is out of range.
    """

    def dropped(spectrum: Spectrum) -> Spectrum:
        before = spectrum.temperature
        is_trained = before.scale != 1 or before.is_trained(layout.training_length)
        keeps = is_trained and to.temperature.is_none
        return replace(to, temperature=before) if keeps else to

    new = list(layout.layers)
    for index in _indices(f"{key}.layers", layers, len(new)):
        spectra = list(new[index].spectra)
        for head in _indices(f"{key}.heads", heads, len(spectra)):
            spectra[head] = dropped(spectra[head])
        norms = new[index].qk_norm or qk_norm
        new[index] = replace(new[index], spectra=tuple(spectra), qk_norm=norms)
    if windows is not None:
        for index, layer in enumerate(new):
            new[index] = replace(layer, window=windows[index % len(windows)])
    return replace(layout, layers=tuple(new))


def _indices(key: str, chosen: Collection[int] | None, count: int) -> list[int]:
    """Return indices from 0 on, in order (None: all); raise a UserError if one is out of range."""
    every = range(count)
    if chosen is None:
        return [*every]
    if not {*chosen} <= {*range(-count, count)}:
        raise UserError(f"{key}: expected numbers from {-count} to {count - 1}, got {[*chosen]}")
    return sorted({every[index] for index in chosen})
