"""The ``positional`` configuration group, and the layout that it describes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainer.errors import UserError, did_you_mean
from trainer.positional.encodings import ENCODINGS, make_spectrum
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import (
    MOST_COEFFICIENT,
    MOST_EXPONENT,
    MOST_SCALE,
    Spectrum,
    Temperature,
)


@dataclass(frozen=True)
class TemperatureConfig:
    """Factor on the logits: ``scale`` (1 + ``coefficient`` ln s)^``exponent``, from the first step
    on.

    s = max(n, R) / R, or 1 + floor(n / R) with ``steps``. n is the number of keys that a query
    sees, or with ``per: sequence`` the tokens of its sequence. R is the ``reference`` (null: C, so
    that nothing changes before C). ``heads``: ``all``, or only heads ``free`` of rotation, as in
    Llama 4.
    """

    coefficient: float = 0.0
    exponent: float = 1.0
    scale: float = 1.0
    per: Literal["sequence", "query"] = "query"
    reference: int | None = None
    steps: bool = False
    heads: Literal["all", "free"] = "all"

    @property
    def is_none(self) -> bool:
        """Whether the factor is 1 everywhere."""
        return self.coefficient == 0 and self.scale == 1

    def problems(self) -> list[str]:
        """Check the values; return a message per problem."""
        found = [
            f"positional.temperature.{key}: expected a number from {least} to {most}, got {value}."
            for key, least, most in (
                ("coefficient", 0, MOST_COEFFICIENT),
                ("exponent", 0, MOST_EXPONENT),
                ("scale", 0.001, MOST_SCALE),
            )
            if not least <= (value := getattr(self, key)) <= most
        ]
        if self.reference is not None and self.reference < 1:
            found.append(
                "positional.temperature.reference: expected tokens, 1 or more, or null for the "
                f"training length, got {self.reference}."
            )
        return found

    def reaches(self, spectrum: Spectrum) -> bool:
        """Whether the factor changes the logits of a head with this spectrum."""
        free = not (spectrum.rotates or spectrum.alibi)
        return not self.is_none and (self.heads == "all" or free)

    def on(self, spectrum: Spectrum) -> Spectrum:
        """Return the spectrum with this temperature.

        Raises:
            UserError: its encoding has a temperature of its own.
        """
        if not self.reaches(spectrum):
            return spectrum
        if not spectrum.temperature.is_none:
            raise UserError(
                "positional.temperature: an encoding has a temperature of its own; set its "
                "positional.encodings.NAME.temperature=0, or leave this one out."
            )
        values = (self.coefficient, self.exponent, self.scale, self.per)
        return replace(spectrum, temperature=Temperature(*values, self.reference, self.steps))


@dataclass(frozen=True)
class PositionalConfig:
    """Encodings over layers and heads.

    ``layers``: encoding names, repeated over the depth: ``[rope]`` is RoPE everywhere, ``[rope,
    rope, rope, nope]`` is iRoPE. ``windows``: sliding windows in tokens, repeated likewise (null:
    full attention). ``heads``: share of the key-value heads in every layer that get another
    encoding, counted from the last head: ``{nope: 0.5}``. ``encodings``: parameters by name. A name
    of your own with a ``type`` is a variant: ``{local: {type: rope, base: 1e4}, global: {type:
    rope, base: 1e6}}``. ``temperature``: temperature of the softmax by length, for encodings
    without one of their own.
    """

    layers: list[str] = field(default_factory=lambda: ["rope"])
    windows: list[int | None] = field(default_factory=lambda: [None])
    heads: dict[str, float] = field(default_factory=dict)
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict)
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)


def unknown_encodings(config: PositionalConfig) -> list[str]:
    """Return a message for every name under which no encoding is registered."""
    kinds = {
        name: str(config.encodings.get(name, {}).get("type", name))
        for name in dict.fromkeys([*config.layers, *config.heads, *config.encodings])
    }
    choices = {*ENCODINGS, *(name for name, kind in kinds.items() if kind in ENCODINGS)}
    return [
        f"positional: unknown encoding {kind!r}.{did_you_mean(kind, choices)}"
        for kind in dict.fromkeys(kinds.values())
        if kind not in ENCODINGS
    ]


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
    problems = [*unknown_encodings(config), *config.temperature.problems()]

    def spectrum(name: str) -> Spectrum | None:
        given = dict(config.encodings.get(name, {}))
        kind = str(given.pop("type", name))
        if kind not in ENCODINGS:
            return None
        try:
            made = make_spectrum(kind, head_dim, training_length, given, variant=name)
            return config.temperature.on(made) if name in used else made
        except UserError as error:
            problems.extend(error.problems)
            return None

    for key in ("layers", "windows"):
        if not getattr(config, key):
            problems.append(f"positional.{key}: expected at least one entry, got an empty list.")
    used = {*config.layers, *config.heads}
    named = dict.fromkeys([*config.layers, *config.heads, *config.encodings])
    spectra = {name: spectrum(name) for name in named}
    for window in config.windows:
        if window is not None and not 1 <= window <= training_length:
            problems.append(
                f"positional.windows: a window of {window} tokens does not fit the training length "
                f"of {training_length}; expected 1 to {training_length}, or null for none."
            )
    reached = {*config.layers[:num_layers], *config.heads}
    of_free = config.temperature.heads == "free" and not config.temperature.is_none
    if of_free and not any(s and config.temperature.reaches(s) for s in map(spectra.get, reached)):
        problems.append(
            "positional.temperature.heads: no head of these layers is free of rotation; expected "
            f"'all', or an encoding that does not rotate among the first {num_layers} of "
            "positional.layers."
        )
    counts: dict[str, int] = {}
    for name, share in config.heads.items():
        heads = share * num_key_value_heads
        # Tolerate a hundredth of a head: 0.333 is one of three.
        if 0 <= share <= 1 and abs(heads - round(heads)) < 0.01:
            counts[name] = round(heads)
        elif not 0 <= share <= 1:
            problems.append(
                f"positional.heads.{name}: expected a share from 0 to 1, got {share:g}."
            )
        else:
            problems.append(
                f"positional.heads.{name}: {share:g} of {num_key_value_heads} key-value heads is "
                "not a whole number of them."
            )
    if sum(counts.values()) > num_key_value_heads:
        problems.append("positional.heads: the shares add up to more than 1.")
    if problems:
        raise UserError(*dict.fromkeys(problems))

    others = [name for name, count in counts.items() for _ in range(count)]

    def layer(index: int) -> LayerEncoding:
        main = config.layers[index % len(config.layers)]
        names = [main] * (num_key_value_heads - len(others)) + others
        return LayerEncoding.of(
            (s for name in names if (s := spectra[name]) is not None),
            config.windows[index % len(config.windows)],
            qk_norm,
        )

    return Layout(training_length, tuple(layer(index) for index in range(num_layers)))
