"""Methods change the layout for a length, and nothing at the training length."""

from __future__ import annotations

import math

import pytest

from trainer.evaluation.methods import (
    as_is,
    is_free_of_positions,
    rescaled,
    rotates,
    tempered,
    with_temperature,
)
from trainer.positional.config import PositionalConfig, build_layout


def layout(**positional):
    return build_layout(
        PositionalConfig(**positional),
        num_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        training_length=64,
    )


@pytest.mark.parametrize("rescaling", ["pi", "ntk", "yarn"])
@pytest.mark.parametrize("layers", [["rope"], ["rope", "nope"], ["half_rope"]])
def test_rescalings_are_the_identity_at_the_training_length(rescaling, layers):
    original = layout(layers=layers)
    method = rescaled("rope", "RoPE", original, rescaling)
    assert method.layout_at(1.0) == original
    changed = method.layout_at(4.0)
    assert changed != original
    for before, after in zip(original.layers, changed.layers, strict=True):
        if not before.spectra[0].rotates:
            assert not after.spectra[0].rotates


def test_temperature_is_one_at_the_training_length_and_grows_with_the_logarithm():
    spectrum = tempered(layout(layers=["nope"]), 0.4).layers[0].spectra[0]
    assert spectrum.temperature.at(64, 64) == 1
    assert spectrum.temperature.at(512, 64) == pytest.approx(1 + 0.4 * math.log(8))
    assert with_temperature("drope", "DroPE", layout(layers=["nope"]), 0.4).role == (
        "drope_temperature"
    )


def test_what_applies_to_what():
    assert rotates(layout(layers=["nope", "rope"]))
    assert not rotates(layout(layers=["nope"]))
    assert is_free_of_positions(layout(layers=["nope"]))
    assert not is_free_of_positions(layout(layers=["alibi"]))
    original = layout()
    assert as_is("rope", "RoPE", original).layout_at(8.0) is original
