"""Which spectrum every layer and head has: uniform models, layer hybrids, head hybrids.

A layout is given per key-value head; the query heads that read a key-value head share its spectrum.
An evaluation may give a layer a spectrum for every query head: each then has a copy of its keys.
It travels with every checkpoint, as it is at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from trainer.errors import did_you_mean
from trainer.positional.rescaling import RESCALINGS, Rescaling, dynamic, rescaled
from trainer.positional.spectrum import Spectrum

Factors = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Intervention:
    """What is done to the heads of one layer after the rotation.

    ``query``, ``key``: a factor for every channel of every head, ``[Hq][D]`` and ``[Hkv][D]``, or
    ``[Hq][D]`` in a layer with a spectrum for every query head; empty: all 1. ``query_noise``,
    ``key_noise``: the standard deviation of Gaussian noise that is added to every channel of a
    head, likewise; empty: none.
    The noise is a fixed function of ``seed``, head and position.
    """

    query: Factors = ()
    key: Factors = ()
    query_noise: tuple[float, ...] = ()
    key_noise: tuple[float, ...] = ()
    seed: int = 0


Group = tuple[Spectrum, int]
"""A spectrum, and how many neighbouring key-value heads have it."""
LAYER_WORDS = ("all", "full_attention")
LayerChoice = str | list[int] | None
"""Layers that an extension changes: ``all``, those of ``full_attention``, which have no window, or
indices, of which negative ones count from the last. None: the layers that see more than C keys,
since a window within C meets no distance that was not trained."""


@dataclass(frozen=True)
class LayerEncoding:
    """What happens to queries and keys of one layer between projection and scores.

    ``groups``: the key-value heads, or all query heads, from the first to the last; neighbours with
    equal spectra become one group. ``window``: how many keys a query sees, itself included
    (None: all before it).
    ``qk_norm``: whether the layer's query and key norms are on. ``intervention``: what an
    evaluation does to its heads.
    """

    groups: tuple[Group, ...]
    window: int | None = None
    qk_norm: bool = False
    intervention: Intervention | None = None

    def __post_init__(self) -> None:
        together = groupby(self.groups, key=lambda group: group[0])
        merged = tuple((s, sum(heads for _, heads in groups)) for s, groups in together)
        object.__setattr__(self, "groups", merged)

    @classmethod
    def of(cls, spectra: Iterable[Spectrum], *others: Any, **named: Any) -> LayerEncoding:
        """From a spectrum for every key-value head; the other fields follow."""
        return cls(tuple((spectrum, 1) for spectrum in spectra), *others, **named)

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """One for every key-value head, or for every query head."""
        return tuple(spectrum for spectrum, heads in self.groups for _ in range(heads))

    @property
    def frequencies_follow_length(self) -> bool:
        """Whether a key is rotated otherwise once the sequence has grown."""
        return any(spectrum.long is not None for spectrum, _ in self.groups)

    def expanded(self, queries_per_key: int) -> LayerEncoding:
        """The same with a spectrum for every query head."""
        groups = tuple((spectrum, heads * queries_per_key) for spectrum, heads in self.groups)
        own = self.intervention
        if own is not None:
            keys = tuple(row for row in own.key for _ in range(queries_per_key))
            noise = tuple(std for std in own.key_noise for _ in range(queries_per_key))
            own = replace(own, key=keys, key_noise=noise)
        return replace(self, groups=groups, intervention=own)

    def map(self, change: Callable[[Spectrum], Spectrum]) -> LayerEncoding:
        """The layer with every spectrum replaced by ``change(spectrum)``."""
        return replace(self, groups=tuple((change(s), heads) for s, heads in self.groups))


@dataclass(frozen=True)
class Layout:
    """The encodings of all layers, from the first to the last.

    ``training_length``: C, the length in tokens that the model was trained at, at which every
    rescaling is the identity. Equal layers are one object, so that what is computed for a layer can
    be looked up by its identity.
    """

    training_length: int
    layers: tuple[LayerEncoding, ...]

    def __post_init__(self) -> None:
        by_value: dict[LayerEncoding, LayerEncoding] = {}
        objects = {id(layer): layer for layer in self.layers}
        one = {key: by_value.setdefault(layer, layer) for key, layer in objects.items()}
        object.__setattr__(self, "layers", tuple(one[id(layer)] for layer in self.layers))

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """The distinct spectra, in order of first appearance."""
        distinct = {id(layer): layer for layer in self.layers}.values()
        return tuple(dict.fromkeys(s for layer in distinct for s, _ in layer.groups))

    @cached_property
    def follows_length(self) -> bool:
        """Whether :meth:`at` ever gives something else."""
        return any(spectrum.follows_length for spectrum in self.spectra)

    @cached_property
    def frequencies_follow_length(self) -> bool:
        """Whether keys are rotated otherwise once the sequence has grown."""
        return any(spectrum.long is not None for spectrum in self.spectra)

    @property
    def rotates(self) -> bool:
        """Whether any head rotates."""
        return any(spectrum.rotates for spectrum in self.spectra)

    def at(self, length: int) -> Layout:
        """The layout for a sequence of ``length`` tokens, which follows no length."""
        if not self.follows_length:
            return self
        return self.map(lambda spectrum: spectrum.at(length, self.training_length))

    def map(
        self, change: Callable[[Spectrum], Spectrum], layers: Collection[int] | None = None
    ) -> Layout:
        """The layout with every spectrum of these layers, by default of all, replaced by
        ``change(spectrum)``."""
        indices = range(len(self.layers)) if layers is None else {*layers}
        distinct = {id(self.layers[i]): self.layers[i] for i in indices}
        changed = {key: layer.map(change) for key, layer in distinct.items()}
        return replace(
            self,
            layers=tuple(
                changed[id(layer)] if index in indices else layer
                for index, layer in enumerate(self.layers)
            ),
        )

    def chosen(self, layers: LayerChoice) -> list[int]:
        """Return the indices of the layers that an extension changes, from 0 on.

        Raises:
            ValueError: there is no such layer.
        """
        count, C = len(self.layers), self.training_length
        if problems := layer_problems("layers", layers, count):
            raise ValueError(problems[0])
        if isinstance(layers, list):
            return sorted({index % count for index in layers})
        smallest = {"all": 0, "full_attention": math.inf, None: C + 1}[layers]
        windows = (layer.window or math.inf for layer in self.layers)
        return [index for index, window in enumerate(windows) if window >= smallest]

    def rotating(self, layers: LayerChoice) -> list[int]:
        """Return the indices of the layers that an extension changes and in which a head
        rotates."""
        return [
            index
            for index in self.chosen(layers)
            if any(spectrum.rotates for spectrum, _ in self.layers[index].groups)
        ]

    def of_layers(self, layers: LayerChoice) -> Layout:
        """Return the layout of these layers alone."""
        return replace(self, layers=tuple(self.layers[index] for index in self.chosen(layers)))

    def rescaled(self, rescaling: Rescaling, factor: float, layers: LayerChoice = None) -> Layout:
        """Slow the rotations of ``layers`` for sequences ``factor`` times the training length."""
        C = self.training_length
        return self.map(lambda s: rescaled(s, rescaling, C, factor), self.chosen(layers))

    def dynamically_rescaled(
        self, rescaling: Rescaling, growth: float = 1.0, layers: LayerChoice = None
    ) -> Layout:
        """Slow the rotations of ``layers`` with the length of each sequence, and ``growth`` times
        as fast."""
        C = self.training_length
        return self.map(lambda s: dynamic(s, rescaling, C, growth), self.chosen(layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and checkpoints; each distinct spectrum is written once.

        Raises:
            ValueError: there are interventions, which are never stored.
        """
        if any(layer.intervention is not None for layer in self.layers):
            raise ValueError(
                "a layout with interventions on its heads is for an evaluation, not to store"
            )
        index = {spectrum: i for i, spectrum in enumerate(self.spectra)}
        return {
            "training_length": self.training_length,
            "spectra": [spectrum.to_dict() for spectrum in self.spectra],
            "layers": [
                {
                    "groups": [[index[spectrum], heads] for spectrum, heads in layer.groups],
                    "window": layer.window,
                    "qk_norm": layer.qk_norm,
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Layout:
        """The inverse of :meth:`to_dict`; what the first version wrote is read as well."""
        values = from_first_format(values)
        spectra = [Spectrum.from_dict(spectrum) for spectrum in values["spectra"]]
        return cls(
            values["training_length"],
            tuple(
                LayerEncoding(
                    tuple((spectra[i], heads) for i, heads in layer["groups"]),
                    layer["window"],
                    layer["qk_norm"],
                )
                for layer in values["layers"]
            ),
        )


def layer_problems(key: str, layers: Any, count: int | None = None) -> list[str]:
    """Return what is wrong with a :data:`LayerChoice`, one sentence each.

    Args:
        key: where it stands.
        layers: the choice.
        count: layers of the model (None: not known yet, so that indices are not checked).
    """
    if isinstance(layers, str) and layers not in LAYER_WORDS:
        return [
            f"{key}: expected 'all', 'full_attention', a list of layers, or null for those that "
            f"see more than the training length, got {layers!r}.{did_you_mean(layers, LAYER_WORDS)}"
        ]
    if not isinstance(layers, list):
        return []
    if not layers:
        return [f"{key}: expected one layer or more, got none; null leaves the choice to windows."]
    return [
        f"{key}: layer {index} does not exist in a model of {count} layers; expected 0 to "
        f"{count - 1}, the nearest is {max(-count, min(index, count - 1))}."
        for index in layers
        if count is not None and not -count <= index < count
    ]


def from_first_format(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` themselves where they are of today's form."""
    if "training_length" in values:
        return values
    return {
        "training_length": values["spectra"][0]["training_length"],
        "spectra": [_spectrum(spectrum) for spectrum in values["spectra"]],
        "layers": [
            {**layer, "groups": [[index, 1] for index in layer["heads"]]}
            for layer in values["layers"]
        ],
    }


def _spectrum(values: dict[str, Any]) -> dict[str, Any]:
    length, long = values["training_length"], values.get("beyond")
    others = {
        key: value for key, value in values.items() if key not in ("training_length", "beyond")
    }
    if long is None:
        return others | {"long": None}
    changed = {"length": long["length"], "inv_freq": long["inv_freq"]}
    if long.get("growth"):
        method = RESCALINGS[long.get("rescaling", "ntk")]
        stretch = asdict(method(tuple(long["inv_freq"]), length))
        changed |= {"stretch": stretch, "growth": long["growth"], "reference": length}
    else:
        changed |= {"stretch": None, "growth": 1.0}
    return others | {"long": changed}
