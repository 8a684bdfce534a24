"""Changes of layouts, and files of published factors."""

from __future__ import annotations

import math

import pytest

from trainer.evaluation.layouts import (
    TITLES,
    tempered,
    windowed,
    with_factors,
)
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.rescaling import RESCALINGS


def layout(**positional):
    return build_layout(
        PositionalConfig(**positional),
        num_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        training_length=64,
    )


def test_a_window_is_no_wider_than_the_training_length():
    original = layout(windows=[None, 16])
    changed = windowed(original)
    assert [layer.window for layer in original.layers] == [None, 16, None]
    assert [layer.window for layer in changed.layers] == [64, 16, 64]
    assert changed.spectra == original.spectra


@pytest.mark.parametrize(("coefficient", "exponent"), [(0.412, 1.0), (0.1, 2.0)])
@pytest.mark.parametrize("per", ["sequence", "query"])
def test_temperatures_of_the_papers(coefficient, exponent, per):
    (spectrum,) = tempered(layout(), coefficient, per, exponent).spectra
    assert spectrum.temperature.per == per
    temperature = spectrum.temperature
    assert (temperature.coefficient, temperature.exponent) == (coefficient, exponent)
    if per == "sequence":
        expected = (1 + coefficient * math.log(4)) ** exponent
        assert temperature.at(256, 64).scale == pytest.approx(expected)
    assert spectrum.inv_freq == layout().spectra[0].inv_freq


def test_factors_divide_the_frequencies_beyond_the_training_length():
    original = layout(layers=["rope", "nope"])
    changed = with_factors(original, ((1.0, 2.0, 4.0, 8.0), ()))
    assert changed.layers[1] == original.layers[1]
    before, after = original.layers[0].spectra[0], changed.layers[0].spectra[0]
    assert after.at(64, 64).inv_freq == before.inv_freq
    slow = [f / by for f, by in zip(before.inv_freq, (1.0, 2.0, 4.0, 8.0), strict=True)]
    assert after.at(65, 64).inv_freq == pytest.approx(slow)


def test_every_rescaling_has_a_distinct_title():
    assert list(TITLES) == list(RESCALINGS)
    assert len(set(TITLES.values())) == len(TITLES)
