"""A layout: spectra over layers and heads, as plain data, at any length."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.positional.examples import one_layer
from tests.positional.test_spectrum import spectra
from trainer.positional.intervention import Intervention
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rescaling import RESCALINGS, dynamic, longrope, ntk_aware
from trainer.positional.spectrum import Spectrum, Temperature

C = 64
layers = st.builds(
    LayerEncoding.of,
    st.lists(spectra, min_size=1, max_size=4),
    st.none() | st.integers(1, 4096),
    st.booleans(),
)
layouts = st.builds(
    Layout, st.integers(1, 10**6), st.lists(layers, min_size=1, max_size=4).map(tuple)
)

A, B, FAST = Spectrum((0.5,)), Spectrum(), Spectrum((1.0, 0.1))
TEMPERED = Spectrum(temperature=Temperature(0.3, 2.0, 1.5))


@given(layouts)
def test_a_layout_survives_json(layout):
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def test_a_spectrum_that_many_heads_share_is_written_once():
    layout = Layout(C, (LayerEncoding.of((A, B, A)),) * 5)
    assert len(layout.to_dict()["spectra"]) == 2
    assert layout.spectra == (A, B)


def test_neighbouring_heads_with_one_spectrum_are_one_group():
    assert LayerEncoding.of((A, A, B, A)).groups == ((A, 2), (B, 1), (A, 1))
    assert LayerEncoding(((A, 1), (A, 2))) == LayerEncoding.of((A, A, A))


@given(layouts)
def test_groups_spell_out_the_heads(layout):
    for layer in layout.layers:
        assert tuple(s for s, count in layer.groups for _ in range(count)) == layer.spectra


def test_a_change_reaches_every_head_and_leaves_windows_and_norms():
    layout = Layout(C, (LayerEncoding.of((A, B), 16, True), LayerEncoding.of((B, B))))
    changed = layout.map(lambda spectrum: A if spectrum == B else B)
    expected = LayerEncoding.of((B, A), 16, True), LayerEncoding.of((A, A))
    assert changed == Layout(C, expected)


def test_equal_layouts_are_equal_keys_and_equal_layers_one_object():
    assert len({one_layer(C, Spectrum((0.5,))) for _ in range(3)}) == 1
    layout = Layout(C, tuple(LayerEncoding.of((Spectrum((0.5,)),)) for _ in range(4)))
    assert len({id(layer) for layer in layout.layers}) == 1


FOLLOWING = {
    "a temperature": (TEMPERED, False),
    "dynamic NTK": (dynamic(FAST, ntk_aware, C), True),
    "LongRoPE": (longrope(FAST, (1.0, 1.0), (1.0, 2.0), C), True),
}
some = st.sampled_from([A, B, *(spectrum for spectrum, _ in FOLLOWING.values())])


@given(st.lists(some, min_size=1, max_size=4), st.integers(1, 10**6))
def test_at_a_length_nothing_follows_the_length_any_more(spectra, length):
    layout = one_layer(C, *spectra)
    here = layout.at(length)
    assert not here.follows_length
    assert here.at(length + 1) is here
    assert (here is layout) == (not layout.follows_length)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_what_follows_the_length_is_the_same_within_the_training_length(kind):
    spectrum, moves_keys = FOLLOWING[kind]
    layout = one_layer(C, spectrum, B)
    assert layout.follows_length
    assert layout.frequencies_follow_length == moves_keys
    assert [layer.frequencies_follow_length for layer in layout.layers] == [moves_keys]
    assert layout.at(1) == layout.at(C) != layout.at(2 * C)


def test_the_temperature_of_a_query_is_the_same_in_all_sequences():
    layout = one_layer(C, Spectrum(temperature=Temperature(0.3, per="query")))
    assert not layout.follows_length


def test_the_first_checkpoints_knew_neither_scales_nor_frequencies_that_follow_the_length():
    spectrum = {"training_length": C, "inv_freq": [0.5], "alibi": False, "temperature": {}}
    layers = [{"heads": [0, 0], "window": None, "qk_norm": False}]
    assert Layout.from_dict({"spectra": [spectrum], "layers": layers}) == one_layer(C, A, A)


@pytest.mark.parametrize("name", RESCALINGS)
@pytest.mark.parametrize("length", [C // 2, C, 3 * C])
def test_frequencies_that_follow_the_length_are_read_from_the_first_format(name, length):
    """There the method stood by its name, C in every spectrum, and a spectrum for every head."""
    inv_freq = [1.0, 0.1, 0.01]
    spectrum = {
        "training_length": C,
        "inv_freq": inv_freq,
        "temperature": {"coefficient": 0.2, "exponent": 1.0, "scale": 1.0, "per": "sequence"},
        "alibi": False,
        "rotary_scale": 1.0,
        "beyond": {"length": C, "inv_freq": inv_freq, "growth": 1.0, "rescaling": name},
    }
    still = spectrum | {"inv_freq": [], "beyond": None}
    old = {
        "spectra": [spectrum, still],
        "layers": [{"heads": [0, 0, 1], "window": 8, "qk_norm": True}],
    }
    tempered = Temperature(0.2)
    moving = dynamic(Spectrum(tuple(inv_freq), tempered), RESCALINGS[name], C)
    still_now = Spectrum(temperature=tempered)
    expected = one_layer(C, moving, moving, still_now, window=8, qk_norm=True)
    assert Layout.from_dict(old) == expected
    assert Layout.from_dict(old).at(length) == expected.at(length)


def test_a_layer_of_spectra_for_query_heads_keeps_what_is_done_to_each_key():
    own = Intervention(key=((0.5, 1.0), (1.0, 2.0)), key_noise=(0.1, 0.0))
    layer = replace(LayerEncoding.of((A, B)), intervention=own).expanded(2)
    assert layer.spectra == (A, A, B, B)
    assert layer.intervention.key == ((0.5, 1.0),) * 2 + ((1.0, 2.0),) * 2
    assert layer.intervention.key_noise == (0.1, 0.1, 0.0, 0.0)
