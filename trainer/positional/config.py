"""The ``positional`` configuration group, and the layout it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.errors import UserError, did_you_mean
from trainer.positional.encodings import ENCODINGS, make_spectrum
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class PositionalConfig:
    """Encodings over layers and heads.

    ``layers``: encoding names, repeated over the depth: ``[rope]`` is RoPE everywhere,
    ``[rope, rope, rope, nope]`` is iRoPE.
    ``windows``: sliding windows in tokens, repeated likewise (null: full attention).
    ``heads``: a share of the key-value heads of every layer, the last ones, gets another encoding:
    ``{nope: 0.5}``.
    ``encodings``: parameters by name. A name of your own with a ``type`` is a variant:
    ``{local: {type: rope, base: 1e4}, global: {type: rope, base: 1e6}}``.
    """

    layers: list[str] = field(default_factory=lambda: ["rope"])
    windows: list[int | None] = field(default_factory=lambda: [None])
    heads: dict[str, float] = field(default_factory=dict)
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict)


def unknown_encodings(config: PositionalConfig) -> list[str]:
    """One sentence for every name that no encoding is registered under."""
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
    """The layout that ``config`` describes for a model of this shape.

    Raises:
        UserError: all that is wrong with names, parameters, windows and head shares.
    """
    problems = unknown_encodings(config)

    def spectrum(name: str) -> Spectrum | None:
        given = dict(config.encodings.get(name, {}))
        kind = str(given.pop("type", name))
        if kind not in ENCODINGS:
            return None
        try:
            return make_spectrum(kind, head_dim, training_length, given, variant=name)
        except UserError as error:
            problems.extend(error.problems)
            return None

    for key in ("layers", "windows"):
        if not getattr(config, key):
            problems.append(f"positional.{key}: expected at least one entry, got an empty list.")
    named = dict.fromkeys([*config.layers, *config.heads, *config.encodings])
    spectra = {name: spectrum(name) for name in named}
    for window in config.windows:
        if window is not None and not 1 <= window <= training_length:
            problems.append(
                f"positional.windows: a window of {window} tokens does not fit the training length "
                f"of {training_length}; expected 1 to {training_length}, or null for none."
            )
    counts: dict[str, int] = {}
    for name, share in config.heads.items():
        heads = share * num_key_value_heads
        # A hundredth of a head is let pass: 0.333 is one of three.
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
