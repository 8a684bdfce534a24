"""The ``positional`` configuration group, and the layout that it describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.common.errors import Problem, UserError, collecting, did_you_mean, raise_all
from trainer.common.fields import Count, NotNegative, Share, configuration
from trainer.positional.encodings import ENCODINGS, make_spectrum
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import (
    MOST_COEFFICIENT,
    MOST_EXPONENT,
    MOST_SCALE,
    Spectrum,
    Temperature,
)


@configuration
class TemperatureConfig:
    """Softmax temperature by length: logits times scale (1 + coefficient ln s)^exponent."""

    coefficient: Annotated[NotNegative, Field(le=MOST_COEFFICIENT)] = 0.0
    """c of the factor scale (1 + c ln s)^exponent on the logits, from the first step on."""
    exponent: Annotated[NotNegative, Field(le=MOST_EXPONENT)] = 1.0
    """Exponent of the factor."""
    scale: Annotated[float, Field(ge=0.001, le=MOST_SCALE)] = 1.0
    """Constant part of the factor."""
    per: Literal["sequence", "query"] = "query"
    """Length n that counts: query (keys that a query sees), or sequence (tokens of its
    sequence)."""
    reference: Count | None = None
    """R of s = max(n, R) / R, in tokens; null: the training length."""
    steps: bool = False
    """Use s = 1 + floor(n / R) instead, as Llama 4 does."""
    heads: Literal["all", "free"] = "all"
    """Heads it applies to: all, or free (those without rotation, as in Llama 4)."""

    @property
    def is_none(self) -> bool:
        """Whether the factor is 1 everywhere."""
        return self.coefficient == 0 and self.scale == 1

    def reaches(self, spectrum: Spectrum) -> bool:
        """Whether the factor changes the logits of a head with this spectrum."""
        free = not (spectrum.rotates or spectrum.alibi)
        return not self.is_none and (self.heads == "all" or free)

    def tempered(self, spectrum: Spectrum) -> Spectrum:
        """Return the spectrum with this temperature.

        Raises:
            UserError: its encoding already has a temperature.
        """
        if not self.reaches(spectrum):
            return spectrum
        if not spectrum.temperature.is_none:
            raise UserError.at(
                "positional.temperature",
                "an encoding has a temperature of its own; set its "
                "positional.encodings.NAME.temperature=0, or leave this one out.",
            )
        values = (self.coefficient, self.exponent, self.scale, self.per)
        return replace(spectrum, temperature=Temperature(*values, self.reference, self.steps))


@configuration
class PositionalConfig:
    """Encodings over layers and heads."""

    layers: list[str] = field(default_factory=lambda: ["rope"])
    """Encodings by name, repeated over the depth: [rope, rope, rope, nope] is iRoPE."""
    windows: list[Count | None] = field(default_factory=lambda: [None])
    """Sliding windows in tokens, repeated likewise; null: full attention."""
    heads: dict[str, Share] = field(default_factory=dict)
    """Share of every layer's key-value heads, the last ones, that get another encoding: {nope:
    0.5}."""
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters by encoding. A name of your own with a type is a variant: {local: {type: rope,
    base: 1e4}}."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Softmax temperature by length, for encodings that have none of their own."""


def _shortened(windows: Sequence[int | None], training_length: int) -> str:
    """Return windows without the impossible ones: half the training length takes their places."""
    half = max(training_length // 2, 1)
    fitting = (w if w is None or 1 <= w <= training_length else half for w in windows)
    return ",".join("null" if window is None else str(window) for window in fitting)


def _kinds(config: PositionalConfig) -> dict[str, str]:
    """Return the registered encoding that each configured name stands for."""
    return {
        name: str(config.encodings.get(name, {}).get("type", name))
        for name in [*config.layers, *config.heads, *config.encodings]
    }


def unknown_encodings(config: PositionalConfig) -> list[Problem]:
    """Return a problem for every name under which no encoding is registered."""
    kinds = _kinds(config)
    choices = {*ENCODINGS, *(name for name, kind in kinds.items() if kind in ENCODINGS)}
    return [
        Problem("positional", f"unknown encoding {kind!r}.", did_you_mean(kind, choices))
        for kind in dict.fromkeys(kinds.values())
        if kind not in ENCODINGS
    ]


def spectrum_of(
    config: PositionalConfig, name: str, head_dim: int, training_length: int
) -> Spectrum:
    """Return the spectrum of the encoding ``name``, with the configured temperature.

    Raises:
        UserError: the encoding, its parameters or its temperature are wrong.
    """
    parameters = dict(config.encodings.get(name, {}))
    kind = str(parameters.pop("type", name))
    spectrum = make_spectrum(kind, head_dim, training_length, parameters, variant=name)
    return config.temperature.tempered(spectrum)


def build_layout(
    config: PositionalConfig,
    *,
    num_layers: int,
    num_key_value_heads: int,
    head_dim: int,
    training_length: int,
    qk_norm: bool = False,
) -> Layout:
    """Build the layout that ``config`` describes for a model of this shape.

    Raises:
        UserError: names, parameters, windows or shares of heads are wrong; lists all problems.
    """
    problems = unknown_encodings(config)

    def refuse(key: str, message: str) -> None:
        problems.append(Problem(f"positional.{key}", message))

    for key in ("layers", "windows"):
        if not getattr(config, key):
            refuse(key, "expected at least one entry, got an empty list.")
    used = {*config.layers, *config.heads}
    untempered = replace(config, temperature=TemperatureConfig())
    spectra: dict[str, Spectrum] = {}
    for name, kind in _kinds(config).items():
        if kind in ENCODINGS:
            with collecting(problems):
                settings = config if name in used else untempered
                spectra[name] = spectrum_of(settings, name, head_dim, training_length)
    for window in config.windows:
        if window is not None and not 1 <= window <= training_length:
            refuse(
                "windows",
                f"a window of {window} tokens does not fit the training length of "
                f"{training_length}; expected 1 to {training_length}, or null for none, such "
                f"as positional.windows=[{_shortened(config.windows, training_length)}].",
            )
    present = [spectra[x] for x in (*config.layers[:num_layers], *config.heads) if x in spectra]
    needs_free = config.temperature.heads == "free" and not config.temperature.is_none
    if needs_free and not any(map(config.temperature.reaches, present)):
        refuse(
            "temperature.heads",
            "no head of these layers is free of rotation; expected 'all', or an encoding "
            f"that does not rotate among the first {num_layers} of positional.layers.",
        )
    counts: dict[str, int] = {}
    for name, share in config.heads.items():
        heads = share * num_key_value_heads
        if not 0 <= share <= 1:
            refuse(f"heads.{name}", f"expected a share from 0 to 1, got {share:g}.")
        elif abs(heads - round(heads)) >= 0.01:  # a hundredth of a head: 0.333 is one of three
            refuse(
                f"heads.{name}",
                f"{share:g} of {num_key_value_heads} key-value heads is not a whole number of "
                "them.",
            )
        else:
            counts[name] = round(heads)
    if sum(counts.values()) > num_key_value_heads:
        refuse("heads", "the shares add up to more than 1.")
    raise_all(problems)

    others = [name for name, count in counts.items() for _ in range(count)]

    def layer(index: int) -> LayerEncoding:
        main = config.layers[index % len(config.layers)]
        names = [main] * (num_key_value_heads - len(others)) + others
        window = config.windows[index % len(config.windows)]
        return LayerEncoding.of_heads((spectra[name] for name in names), window, qk_norm)

    return Layout(training_length, tuple(layer(index) for index in range(num_layers)))
