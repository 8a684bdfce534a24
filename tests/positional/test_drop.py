"""The drop is a pure function from one layout to another: of layers, heads, pairs, in steps."""

from __future__ import annotations

import pytest

from trainer.positional.config import PositionalConfig, TemperatureConfig, spectrum_of
from trainer.positional.layout import LayerEncoding, Layout, drop
from trainer.positional.spectrum import Spectrum, Temperature

C = 64
ROPE, SLOW, NOPE = Spectrum((1.0, 0.1)), Spectrum((0.5, 0.01)), Spectrum()
TEMPERED = Spectrum((1.0,), Temperature(0.1, 2.0))
MIXED = Layout(
    C,
    (
        LayerEncoding((ROPE, ROPE), window=16),
        LayerEncoding((ROPE, NOPE)),
        LayerEncoding((TEMPERED, SLOW), window=32, qk_norm=True),
        LayerEncoding((Spectrum(alibi=True), ROPE)),
    ),
)


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


def test_qk_norm_comes_on_only_where_the_encoding_went():
    after = drop(MIXED, layers=[0, 1], qk_norm=True)
    assert [layer.qk_norm for layer in after.layers] == [True, True, True, False]
    assert [layer.qk_norm for layer in drop(MIXED).layers] == [False, False, True, False]


PAIRS = Spectrum((0.8, 0.4, 0.2))
SLOWER = Spectrum(tuple(f / 2 for f in PAIRS.inv_freq))
LAYOUT = Layout(C, (LayerEncoding((PAIRS, PAIRS, SLOWER, SLOWER), window=16),) * 3)


@pytest.mark.parametrize(
    ("heads", "spectra"),
    [
        ([0], (NOPE, PAIRS, SLOWER, SLOWER)),
        ([-1, 1], (PAIRS, NOPE, SLOWER, NOPE)),
        (range(4), (NOPE,) * 4),
        ([], (PAIRS, PAIRS, SLOWER, SLOWER)),
    ],
)
def test_chosen_heads_of_chosen_layers_and_only_those(heads, spectra):
    after = drop(LAYOUT, layers=[1], heads=heads, qk_norm=True)
    assert after.layers[1].spectra == spectra
    assert after.layers[1].window == 16
    assert after.layers[0] == after.layers[2] == LAYOUT.layers[0]
    assert [layer.qk_norm for layer in after.layers] == [False, True, False]


def test_a_temperature_of_free_heads_lets_other_heads_get_an_encoding_that_rotates():
    positional = PositionalConfig(
        layers=["nope", "rope"], temperature=TemperatureConfig(coefficient=0.1, heads="free")
    )
    after = drop(LAYOUT, spectrum_of(positional, "drop.to", "half_rope", 8, C), layers=[1])
    assert after.layers[1].spectra[0].temperature.is_none


def test_a_drop_may_set_windows_also_of_layers_that_keep_their_encoding():
    """SWAN-GPT's conversion: a global layer loses its rotation, the others gain a window."""
    after = drop(LAYOUT, layers=[1], windows=[8, None, 8])
    assert [layer.window for layer in after.layers] == [8, None, 8]
    assert after.layers[1].spectra == (NOPE,) * 4
    assert after.layers[0].spectra == after.layers[2].spectra == LAYOUT.layers[0].spectra


@pytest.mark.parametrize(
    "trained",
    [
        Temperature(1.0, reference=1),
        Temperature(0.1, reference=8, steps=True, per="query"),
        Temperature(0.2, scale=1.5),
        Temperature(0.1, 2.0, reference=C // 2),
    ],
)
def test_a_drop_keeps_a_temperature_that_the_weights_were_trained_with(trained):
    layers = (LayerEncoding((Spectrum((1.0,), trained), TEMPERED)),)
    after = drop(Layout(C, layers))
    assert after.layers[0].spectra == (Spectrum(temperature=trained), NOPE)
    own = Spectrum(temperature=Temperature(0.5, reference=2))
    assert drop(Layout(C, layers), to=own).spectra == (own,)


@pytest.mark.parametrize(("reference", "keeps"), [(C - 1, True), (C, True), (C + 1, False)])
def test_a_temperature_in_steps_acts_from_its_reference_on(reference, keeps):
    tempered = Temperature(0.1, reference=reference, steps=True)
    layout = Layout(C, (LayerEncoding((Spectrum((1.0,), tempered),)),))
    assert drop(layout).spectra == (Spectrum(temperature=tempered) if keeps else NOPE,)


def test_a_model_reaches_as_far_as_its_rescaling_while_any_head_rotates():
    """A drop removes the rescaling with the rotation: an extension then starts from C again."""
    layout = Layout(C, (LayerEncoding((ROPE, ROPE)),) * 2, reach=4 * C)
    assert drop(layout, layers=[0]).longest == layout.longest == 4 * C
    assert drop(layout).longest == C
