"""The temperature that is kept with a checkpoint."""

from __future__ import annotations

import json
import math

import pytest

from trainer.checkpoint import MANIFEST
from trainer.common.errors import UserError
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.runs.fitted_temperature import FILE, keep_temperature, with_fitted_temperature

FITTED = {
    "coefficient": 0.3, "per": "sequence", "lengths": [64], "text": "a", "tokens": 128,
    "training_length": 32,
}  # fmt: skip
LAYOUT = Layout(32, (LayerEncoding.of_heads((Spectrum(),)),))


@pytest.fixture(autouse=True)
def manifest(tmp_path):
    (tmp_path / MANIFEST).write_text("weights")


def test_one_that_was_fitted_on_more_text_stays_and_another_is_read_as_it_was_kept(tmp_path):
    assert with_fitted_temperature(LAYOUT, tmp_path) == (LAYOUT, "")
    assert keep_temperature(tmp_path, FITTED) is None
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.5, "tokens": 127}) == 0.3
    assert FITTED.items() <= json.loads((tmp_path / FILE).read_text()).items()
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.1234567, "per": "query"}) is None
    layout, words = with_fitted_temperature(LAYOUT, tmp_path)
    (spectrum,) = layout.spectra
    assert spectrum.temperature == Temperature(0.1234567, exponent=1.0, per="query")
    assert words == ", logits times 1 + 0.123 ln(n / 32) beyond"


@pytest.mark.parametrize("fitted_at", [32, None])
def test_a_model_that_counts_from_another_length_keeps_the_one_of_the_fit(tmp_path, fitted_at):
    """None: a file of an earlier version, which counted from the length in the checkpoint."""
    keep_temperature(tmp_path, FITTED | {"training_length": fitted_at})
    layout, words = with_fitted_temperature(LAYOUT.with_training_length(8), tmp_path, 32)
    (spectrum,) = layout.spectra
    assert spectrum.at(64, 8).temperature.scale == pytest.approx(1 + 0.3 * math.log(64 / 32))
    assert words == ", logits times 1 + 0.3 ln(n / 32) beyond"


def test_one_that_cannot_be_read_makes_place_for_what_was_fitted(tmp_path):
    (tmp_path / FILE).write_text('{"a')
    assert keep_temperature(tmp_path, FITTED) is None
    assert FITTED.items() <= json.loads((tmp_path / FILE).read_text()).items()


def test_one_of_other_weights_is_not_used_and_not_kept(tmp_path, caplog):
    """Such as one left in the place of a damaged checkpoint."""
    keep_temperature(tmp_path, FITTED)
    (tmp_path / MANIFEST).write_text("other weights")
    assert with_fitted_temperature(LAYOUT, tmp_path) == (LAYOUT, "")
    assert "it was fitted on other weights" in caplog.text
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.5, "tokens": 1}) is None
    assert "times 1 + 0.5 ln" in with_fitted_temperature(LAYOUT, tmp_path)[1]


def test_one_that_earlier_versions_kept_is_used(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(FITTED))
    assert with_fitted_temperature(LAYOUT, tmp_path)[1]
    assert keep_temperature(tmp_path, FITTED | {"coefficient": 0.5, "tokens": 127}) == 0.3


def test_a_model_that_was_trained_with_a_temperature_keeps_its_own(tmp_path):
    """RoPE-ID after a second stage: one may be fitted from the length of the first one."""
    keep_temperature(tmp_path, FITTED | {"training_length": 8})
    trained = Layout(
        32, (LayerEncoding.of_heads((Spectrum(temperature=Temperature(0.1, 2.0, reference=8)),)),)
    )
    assert with_fitted_temperature(trained, tmp_path, 32) == (trained, "")


def test_a_coefficient_of_nothing_changes_nothing(tmp_path):
    keep_temperature(tmp_path, FITTED | {"coefficient": 0.0})
    assert with_fitted_temperature(LAYOUT, tmp_path) == (LAYOUT, "")


def test_one_that_was_fitted_for_some_layers_is_theirs_alone(tmp_path):
    layout = Layout(32, LAYOUT.layers * 3)
    keep_temperature(tmp_path, FITTED | {"layers": [0, 2]})
    result, words = with_fitted_temperature(layout, tmp_path)
    of_layers = [layer.spectra[0].temperature.coefficient for layer in result.layers]
    assert of_layers == [0.3, 0.0, 0.3]
    assert words.endswith("beyond in layers 0, 2")
    with pytest.raises(UserError, match=r"^checkpoint: .*json': layers: layer 2 does not exist"):
        with_fitted_temperature(Layout(32, LAYOUT.layers * 2), tmp_path)


@pytest.mark.parametrize("coefficient", [-0.1, 100.1])
def test_a_coefficient_that_no_grid_holds_is_refused(tmp_path, coefficient):
    keep_temperature(tmp_path, FITTED | {"coefficient": coefficient})
    with pytest.raises(UserError, match=r"^checkpoint: .*temperature.json' holds no temperature "):
        with_fitted_temperature(LAYOUT, tmp_path)


def test_a_temperature_of_every_head_is_read_as_it_was_kept(tmp_path):
    """Two query heads share each key-value head: every query head gets a spectrum."""
    layer = LayerEncoding.of_heads((Spectrum(), Spectrum()))
    layout = Layout(32, (layer,) * 2)
    rows = [[0.1, 0.2, 0.3, 0.4]]
    keep_temperature(tmp_path, FITTED | {"layers": [1], "heads": rows})
    result, words = with_fitted_temperature(layout, tmp_path)
    assert result.layers[0] == layer
    assert [s.temperature.coefficient for s in result.layers[1].spectra] == rows[0]
    assert words == (
        ", logits of each head times 1 + c ln(n / 32) beyond, c 0.3 on average in layers 1"
    )


@pytest.mark.parametrize("rows", [[[0.1, 0.2, 0.3]], [[0.1, 0.2]] * 2, [[]]])
def test_heads_that_the_model_does_not_have_are_refused(tmp_path, rows):
    layout = Layout(32, (LayerEncoding.of_heads((Spectrum(), Spectrum())),))
    keep_temperature(tmp_path, FITTED | {"layers": [0], "heads": rows})
    with pytest.raises(UserError, match=r"^checkpoint: .*heads are not those of the model"):
        with_fitted_temperature(layout, tmp_path)
