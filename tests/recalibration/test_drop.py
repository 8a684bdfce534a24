"""The drop is a pure function from one layout to another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.recalibration.drop import drop

C = 64
ROPE, SLOW, NOPE = Spectrum((1.0, 0.1)), Spectrum((0.5, 0.01)), Spectrum()
MIXED = Layout(
    C,
    (
        LayerEncoding.of((ROPE, ROPE), window=16),
        LayerEncoding.of((ROPE, NOPE)),
        LayerEncoding.of((Spectrum((1.0,), Temperature(0.1, 2.0)), SLOW), window=32, qk_norm=True),
        LayerEncoding.of((Spectrum(alibi=True), ROPE)),
    ),
)
subsets = st.none() | st.sets(st.integers(-4, 3))


def dropped_layers(layout):
    return [i for i, layer in enumerate(layout.layers) if layer.spectra == (NOPE, NOPE)]


def test_by_default_no_layer_keeps_its_encoding():
    after = drop(MIXED)
    assert after.spectra == (NOPE,)
    assert after.training_length == C


@pytest.mark.parametrize(
    ("chosen", "changed"), [([0, 2], [0, 2]), ([-1], [3]), ([-4, 0], [0]), ([], [])]
)
def test_chosen_layers_and_only_those(chosen, changed):
    after = drop(MIXED, layers=chosen)
    assert dropped_layers(after) == changed
    for i in set(range(4)) - set(changed):
        assert after.layers[i] == MIXED.layers[i]


@pytest.mark.parametrize("index", [4, -5])
def test_a_layer_that_does_not_exist_is_refused(index):
    with pytest.raises(ValueError, match=f"layer {index} does not exist in a model of 4"):
        drop(MIXED, layers=[0, index])


@given(subsets, st.booleans())
def test_dropping_twice_is_dropping_once(layers, qk_norm):
    once = drop(MIXED, layers=layers, qk_norm=qk_norm)
    assert drop(once, layers=layers, qk_norm=qk_norm) == once


@given(subsets, st.booleans())
def test_windows_stay(layers, qk_norm):
    after = drop(MIXED, layers=layers, qk_norm=qk_norm)
    assert [layer.window for layer in after.layers] == [16, None, 32, None]


def test_qk_norm_comes_on_only_where_the_encoding_went():
    after = drop(MIXED, layers=[0, 1], qk_norm=True)
    assert [layer.qk_norm for layer in after.layers] == [True, True, True, False]


def test_qk_norm_is_never_turned_off():
    assert [layer.qk_norm for layer in drop(MIXED).layers] == [False, False, True, False]


def test_another_encoding_may_take_the_place():
    after = drop(MIXED, layers=[1], to=SLOW)
    assert after.layers[1].spectra == (SLOW, SLOW)


def test_the_layout_from_before_is_untouched():
    before = MIXED.to_dict()
    drop(MIXED, qk_norm=True)
    assert MIXED.to_dict() == before
