"""The temperature that is kept with a checkpoint."""

from __future__ import annotations

import json
import math

import pytest

from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.runs.fitted_temperature import FILE, keep_temperature, with_fitted_temperature

FITTED = {
    "coefficient": 0.3, "per": "sequence", "lengths": [64], "text": "a", "tokens": 128,
    "training_length": 32,
}  # fmt: skip
LAYOUT = Layout(32, (LayerEncoding.of_heads((Spectrum(),)),))


def test_one_that_was_fitted_on_more_text_stays_and_another_is_read_as_it_was_kept(tmp_path):
    assert with_fitted_temperature(LAYOUT, tmp_path) == (LAYOUT, "")
    assert keep_temperature(tmp_path, FITTED) is None
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.5, "tokens": 127}) == 0.3
    assert json.loads((tmp_path / FILE).read_text()) == FITTED
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.1234567, "per": "query"}) is None
    layout, words = with_fitted_temperature(LAYOUT, tmp_path)
    (spectrum,) = layout.spectra
    assert spectrum.temperature == Temperature(0.1234567, exponent=1.0, per="query")
    assert words == ", logits times 1 + 0.123 ln(n / 32) beyond"


def test_a_model_that_counts_from_another_length_keeps_the_one_of_the_fit(tmp_path):
    keep_temperature(tmp_path, FITTED)
    layout, words = with_fitted_temperature(LAYOUT.with_training_length(8), tmp_path)
    (spectrum,) = layout.spectra
    assert spectrum.at(64, 8).temperature.scale == pytest.approx(1 + 0.3 * math.log(64 / 32))
    assert words == ", logits times 1 + 0.3 ln(n / 32) beyond"


def test_a_model_that_was_trained_with_a_temperature_keeps_its_own(tmp_path):
    """RoPE-ID after a second stage: one may be fitted from the length of the first one."""
    keep_temperature(tmp_path, FITTED | {"training_length": 8})
    trained = Layout(
        32, (LayerEncoding.of_heads((Spectrum(temperature=Temperature(0.1, 2.0, reference=8)),)),)
    )
    assert with_fitted_temperature(trained, tmp_path) == (trained, "")


def test_one_that_was_fitted_for_some_layers_is_theirs_alone(tmp_path):
    layout = Layout(32, LAYOUT.layers * 3)
    keep_temperature(tmp_path, FITTED | {"layers": [0, 2]})
    result, words = with_fitted_temperature(layout, tmp_path)
    of_layers = [layer.spectra[0].temperature.coefficient for layer in result.layers]
    assert of_layers == [0.3, 0.0, 0.3]
    assert words.endswith("beyond in layers 0, 2")
