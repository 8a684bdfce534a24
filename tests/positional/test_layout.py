"""Spectra and layouts as plain data: wavelengths, temperatures, heads, JSON, any length."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.positional.examples import one_layer
from trainer.positional.encodings import by_name
from trainer.positional.layout import Intervention, LayerEncoding, Layout
from trainer.positional.rescaling import (
    RESCALINGS,
    dynamic,
    longrope,
    ntk_aware,
    rescaled,
    yarn,
)
from trainer.positional.spectrum import LongFrequencies, Spectrum, Stretch, Temperature

C = 64
finite = st.floats(-4, 4)
temperatures = st.builds(
    Temperature, finite, finite, st.floats(0.1, 4), st.sampled_from(["sequence", "query"])
)
frequencies = st.lists(st.floats(0, 3.14), max_size=6).map(tuple)
spectra = st.builds(
    Spectrum,
    frequencies,
    temperatures,
    st.booleans(),
    st.floats(0.1, 4),
    st.none()
    | st.builds(
        LongFrequencies,
        st.integers(1, 10**6),
        frequencies,
        st.none() | st.builds(Stretch, frequencies, frequencies, st.floats(0, 1)),
        st.floats(0, 8),
    ),
)
layers = st.builds(
    LayerEncoding,
    st.lists(spectra, min_size=1, max_size=4).map(tuple),
    st.none() | st.integers(1, 4096),
    st.booleans(),
)
layouts = st.builds(
    Layout,
    st.integers(1, 10**6),
    st.lists(layers, min_size=1, max_size=4).map(tuple),
    st.integers(0, 10**6),
)

A, B, FAST = Spectrum((0.5,)), Spectrum(), Spectrum((1.0, 0.1))
TEMPERED = Spectrum(temperature=Temperature(0.3, 2.0, 1.5))


@given(layouts)
def test_a_layout_survives_json(layout):
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize("name", RESCALINGS)
def test_a_layout_survives_json_after_every_rescaling(name):
    layout = one_layer(C, by_name("rope", 16, C), by_name("half_rope", 16, C))
    fixed = layout.rescaled(RESCALINGS[name], 4.0)
    followed = layout.dynamically_rescaled(RESCALINGS[name])
    for changed in (fixed, followed, followed.rescaled(yarn, 2.0)):
        text = json.dumps(changed.to_dict(), allow_nan=False)
        assert Layout.from_dict(json.loads(text)) == changed


def test_neighbouring_heads_with_one_spectrum_are_one_group():
    assert LayerEncoding((A, A, B, A)).groups == ((A, 2), (B, 1), (A, 1))


def test_a_change_reaches_every_head_and_leaves_windows_and_norms():
    layout = Layout(C, (LayerEncoding((A, B), 16, True), LayerEncoding((B, B))))
    changed = layout.map(lambda spectrum: A if spectrum == B else B)
    expected = LayerEncoding((B, A), 16, True), LayerEncoding((A, A))
    assert changed == Layout(C, expected)


FOLLOWING = {
    "a temperature": (TEMPERED, False),
    "dynamic NTK": (dynamic(FAST, ntk_aware, C), True),
    "LongRoPE": (longrope(FAST, (1.0, 1.0), (1.0, 2.0), C), True),
}
some = st.sampled_from([A, B, *(spectrum for spectrum, _ in FOLLOWING.values())])


@given(st.lists(some, min_size=1, max_size=4), st.integers(1, 10**6))
def test_at_a_length_nothing_follows_the_length_any_more(spectra, length):
    layout = one_layer(C, *spectra)
    fixed = layout.at(length)
    assert not fixed.follows_length
    assert fixed.at(length + 1) is fixed
    assert (fixed is layout) == (not layout.follows_length)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_spectra_that_follow_the_length_are_constant_within_the_training_length(kind):
    spectrum, moves_keys = FOLLOWING[kind]
    layout = one_layer(C, spectrum, B)
    assert layout.follows_length
    assert any(s.long for s in layout.spectra) == moves_keys
    assert layout.at(1) == layout.at(C) != layout.at(2 * C)


@pytest.mark.parametrize("pattern", [[4096, 4096, 4096, -1], [-1, 1024], [-1]])
def test_by_default_layers_are_rescaled_as_olmo_core_does(pattern):
    """OLMo 3: C = 8,192, YaRN with a factor of 8 on the layers without a window (-1), as its
    ``with_rope_scaling`` does by default (full_attn_layers_only)."""
    trained = Spectrum(tuple(500_000.0 ** (-m / 64) for m in range(64)))
    windows = [pattern[i % len(pattern)] for i in range(8)]
    layout = Layout(8192, tuple(LayerEncoding((trained,), None if w < 0 else w) for w in windows))
    slowed = rescaled(trained, yarn, 8192, 8.0)
    assert slowed.inv_freq[-1] == pytest.approx(trained.inv_freq[-1] / 8)
    expected = [slowed if window == -1 else trained for window in windows]
    extended = layout.rescaled(yarn, 8.0)
    assert [layer.spectra[0] for layer in extended.layers] == expected
    assert [layer.window for layer in extended.layers] == [layer.window for layer in layout.layers]
    followed = layout.dynamically_rescaled(yarn)
    assert [layer.spectra[0] for layer in followed.at(8 * 8192).layers] == expected
    assert followed.at(8192) == layout


def test_a_model_that_reaches_further_is_extended_from_there():
    """A published model with a reach of 4 C: at 8 C its frequencies, trained at 4 C, halve."""
    layout = Layout(C, (LayerEncoding((FAST,)),), reach=4 * C)
    halved = Layout(C, (LayerEncoding((Spectrum((0.5, 0.05)),)),), reach=4 * C)
    pi = RESCALINGS["pi"]
    assert layout.rescaled(pi, 8.0) == halved
    assert layout.rescaled(pi, 2.0) == layout.rescaled(pi, 4.0) == layout
    followed = layout.dynamically_rescaled(pi)
    assert followed.at(2 * C) == followed.at(4 * C) == layout
    assert followed.at(8 * C) == halved


@pytest.mark.parametrize(
    ("choice", "layers"),
    [
        (None, [2, 3]),  # a window of C sees no distance beyond those of training
        ("all", [0, 1, 2, 3]),
        ([-1, 0, 3], [0, 3]),
    ],
)
def test_a_choice_of_layers(choice, layers):
    layout = Layout(C, tuple(LayerEncoding((A,), w) for w in (16, C, C + 1, None)))
    assert layout.chosen(choice) == layers
    assert layout.of_layers(choice).layers == tuple(layout.layers[i] for i in layers)


@pytest.mark.parametrize("length", [8, C, C + 1, 4 * C])
@pytest.mark.parametrize("other", [16, C, 256])
def test_another_training_length_changes_no_spectrum_at_any_length(other, length):
    """Only what methods start from: a temperature without a reference keeps C."""
    slowed = dynamic(FAST, ntk_aware, C)
    layout = one_layer(C, slowed, TEMPERED, longrope(FAST, (1.0, 1.0), (2.0, 3.0), C), FAST)
    changed = layout.with_training_length(other)
    assert changed.training_length == other
    assert changed.at(length).layers == layout.at(length).layers
    again = changed.with_training_length(3 * C)
    assert again.at(length).layers == layout.at(length).layers
    by_query = one_layer(C, TEMPERED.with_temperature(per="query")).with_training_length(other)
    assert by_query.spectra[0].temperature.reference == (None if other == C else C)


@given(temperatures, st.integers(1, 4096), st.integers(0, 4096))
def test_inside_the_training_length_the_temperature_is_its_scale(temperature, length, shorter):
    at = temperature.at(max(length - shorter, 0), training_length=length)
    assert at.scale == pytest.approx(temperature.scale)
    assert at == temperature or at.is_constant


def test_frequencies_switch_where_longrope_changes_them_at_once():
    spectra = (longrope(FAST, (1.0, 1.0), (1.0, x), 3 * C) for x in (2.0, 1.0))
    assert one_layer(C, *spectra).switches == {3 * C}
    assert one_layer(C, FAST, dynamic(FAST, ntk_aware, C)).switches == set()


def test_interventions_of_shared_keys_go_to_each_of_their_queries():
    rope = by_name("rope", 16, 32)
    changed = Intervention(key=((1.0,), (0.5,)), key_noise=(0.0, 1.0))
    layer = LayerEncoding((rope, rope), intervention=changed).expanded(4)
    assert layer.intervention == Intervention(
        key=((1.0,), (1.0,), (0.5,), (0.5,)), key_noise=(0.0, 0.0, 1.0, 1.0)
    )


def test_a_layer_has_one_intervention():
    layer = LayerEncoding((A,)).with_intervention(Intervention(query=((2.0, 2.0),)))
    with pytest.raises(ValueError, match="two on it do not combine"):
        layer.with_intervention(Intervention(key=((2.0, 2.0),)))
