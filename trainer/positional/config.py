"""The ``positional`` configuration group, and the layout that it describes."""

from dataclasses import asdict, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from trainer.common.errors import UserError
from trainer.common.fields import Share, configuration
from trainer.positional.encodings import ENCODINGS, by_name
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature

Windows = Annotated[list[PositiveInt | None], Field(min_length=1)]
"""Sliding windows in tokens, repeated over the depth; null: full attention."""


@configuration
class TemperatureConfig:
    """Softmax temperature by length: logits times scale (1 + coefficient ln s)^exponent."""

    coefficient: NonNegativeFloat = 0.0
    """c of the factor scale (1 + c ln s)^exponent on the logits, from the first step on."""
    exponent: NonNegativeFloat = 1.0
    """Exponent of the factor."""
    scale: PositiveFloat = 1.0
    """Constant part of the factor."""
    per: Literal["sequence", "query"] = "query"
    """Length n that counts: query (keys that a query sees), or sequence (tokens of its
    sequence)."""
    reference: PositiveInt | None = None
    """R of s = max(n, R) / R, in tokens; null: the training length."""
    steps: bool = False
    """Use s = 1 + floor(n / R) instead, as Llama 4 does."""
    heads: Literal["all", "free"] = "all"
    """Heads it applies to: all, or free (those without rotation and ALiBi, as in Llama 4)."""


@configuration
class PositionalConfig:
    """Encodings over layers and heads."""

    layers: Annotated[list[str], Field(min_length=1)] = field(default_factory=lambda: ["rope"])
    """Encodings by name, repeated over the depth: [rope, rope, rope, nope] is iRoPE."""
    windows: Windows = field(default_factory=lambda: [None])
    """Sliding windows in tokens, repeated likewise; null: full attention."""
    heads: dict[str, Share] = field(default_factory=dict)
    """Share of every layer's key-value heads, the last ones, that get another encoding: {nope:
    0.5}."""
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters by encoding. A name of your own with a type is a variant: {local: {type: rope,
    base: 1e4}}."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Softmax temperature by length; an error beside an encoding that has one of its own."""


def spectrum_of(
    config: PositionalConfig, key: str, name: str, head_dim: int, training_length: int
) -> Spectrum:
    """Return the spectrum of the encoding that ``key`` names, with the configured temperature;
    raise a UserError if one of them is wrong, or the encoding has a temperature of its own."""
    parameters = dict(config.encodings.get(name, {}))
    kind = str(parameters.pop("type", name))
    ENCODINGS.find(kind, key)
    try:
        spectrum = by_name(kind, head_dim, training_length, **parameters)
    except (TypeError, ValueError) as error:
        raise UserError(f"positional.encodings.{name}: {error}") from error
    values = asdict(config.temperature)
    skips = values.pop("heads") == "free" and (spectrum.rotates or spectrum.alibi)
    temperature = Temperature(**values)
    if temperature.is_none or skips:
        return spectrum
    if not spectrum.temperature.is_none:
        raise UserError(f"positional.temperature: encoding {name} has one of its own")
    return replace(spectrum, temperature=temperature)


def build_layout(
    config: PositionalConfig,
    *,
    num_layers: int,
    num_key_value_heads: int,
    head_dim: int,
    training_length: int,
    qk_norm: bool = False,
) -> Layout:
    """Build the layout that ``config`` describes for a model of this shape; raise a UserError if
    names, parameters or shares of heads are wrong."""
    for name, values in config.encodings.items():
        ENCODINGS.find(str(values.get("type", name)), f"positional.encodings.{name}")
    keys = dict.fromkeys(config.heads, "positional.heads")
    keys |= dict.fromkeys(config.layers[:num_layers], "positional.layers")
    spectra = {
        name: spectrum_of(config, key, name, head_dim, training_length)
        for name, key in keys.items()
    }
    others: list[str] = []
    for name, share in config.heads.items():
        heads = share * num_key_value_heads
        if abs(heads - round(heads)) >= 0.01:  # a hundredth of a head: 0.333 is one of three
            raise UserError(
                f"positional.heads.{name}: expected a share of {num_key_value_heads} key-value "
                f"heads that is a whole number of them, got {share:g}"
            )
        others += [name] * round(heads)
    if len(others) > num_key_value_heads:
        raise UserError("positional.heads: the shares add up to more than 1")

    def layer(index: int) -> LayerEncoding:
        main = config.layers[index % len(config.layers)]
        names = [main] * (num_key_value_heads - len(others)) + others
        window = config.windows[index % len(config.windows)]
        return LayerEncoding(tuple(spectra[name] for name in names), window, qk_norm)

    return Layout(training_length, tuple(layer(index) for index in range(num_layers)))
