"""The drop is a pure function from one layout to another: of layers, heads, pairs, in steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.positional.config import PositionalConfig, TemperatureConfig, build_layout
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rescaling import ntk_aware
from trainer.positional.spectrum import LongFrequencies, Spectrum, Temperature
from trainer.recalibration.config import ChangeConfig
from trainer.recalibration.drop import drop, dropped_layout, shrunk

C = 64
ROPE, SLOW, NOPE = Spectrum((1.0, 0.1)), Spectrum((0.5, 0.01)), Spectrum()
TEMPERED = Spectrum((1.0,), Temperature(0.1, 2.0))
MIXED = Layout(
    C,
    (
        LayerEncoding.of_heads((ROPE, ROPE), window=16),
        LayerEncoding.of_heads((ROPE, NOPE)),
        LayerEncoding.of_heads((TEMPERED, SLOW), window=32, qk_norm=True),
        LayerEncoding.of_heads((Spectrum(alibi=True), ROPE)),
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
    after = drop(MIXED, ChangeConfig(layers=chosen))
    assert dropped_layers(after) == changed
    for i in set(range(4)) - set(changed):
        assert after.layers[i] == MIXED.layers[i]


@pytest.mark.parametrize("index", [4, -5])
def test_a_layer_that_does_not_exist_is_refused(index):
    with pytest.raises(ValueError, match=f"layer {index} does not exist in a model of 4"):
        drop(MIXED, ChangeConfig(layers=[0, index]))


@given(subsets, st.booleans())
def test_dropping_twice_is_dropping_once(layers, qk_norm):
    once = drop(MIXED, ChangeConfig(layers=layers), qk_norm=qk_norm)
    assert drop(once, ChangeConfig(layers=layers), qk_norm=qk_norm) == once


@pytest.mark.parametrize("steps", [0, 4])
def test_a_drop_may_set_windows_also_of_layers_that_keep_their_encoding(steps):
    """SWAN-GPT's conversion: a global layer loses its rotation, the others gain a window."""
    change = ChangeConfig(layers=[1], windows=[8, None, 8], anneal_steps=steps)
    after = dropped_layout(LAYOUT, POSITIONAL, change, 6)
    assert [layer.window for layer in after.layers] == [8, None, 8]
    if steps:
        assert after.spectra == LAYOUT.spectra
        after = shrunk(after, POSITIONAL, change, 6, steps)
    assert [layer.window for layer in after.layers] == [8, None, 8]
    assert after.layers[1].spectra == (NOPE,) * 4
    assert after.layers[0].spectra == after.layers[2].spectra == LAYOUT.layers[0].spectra


def test_qk_norm_comes_on_only_where_the_encoding_went():
    after = drop(MIXED, ChangeConfig(layers=[0, 1]), qk_norm=True)
    assert [layer.qk_norm for layer in after.layers] == [True, True, True, False]


def test_qk_norm_is_never_turned_off():
    assert [layer.qk_norm for layer in drop(MIXED).layers] == [False, False, True, False]


def test_another_encoding_may_take_the_place():
    after = drop(MIXED, ChangeConfig(layers=[1]), to=SLOW)
    assert after.layers[1].spectra == (SLOW, SLOW)


TURNS = (8.0, 16.0, 32.0)
"""Tokens that the pairs take to turn once."""
PAIRS = Spectrum(tuple(2 * math.pi / turn for turn in TURNS))
SLOWER = Spectrum(tuple(f / 2 for f in PAIRS.inv_freq))
POSITIONAL = PositionalConfig(
    layers=["rope", "nope"], windows=[16], encodings={"rope": {"base": 100.0}}
)
LAYOUT = Layout(C, (LayerEncoding.of_heads((PAIRS, PAIRS, SLOWER, SLOWER), window=16),) * 3)


def left_of(spectrum, *factors):
    return tuple(f * factor for f, factor in zip(spectrum.inv_freq, factors, strict=True))


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
    after = drop(LAYOUT, ChangeConfig(layers=[1], heads=heads), qk_norm=True)
    assert after.layers[1].spectra == spectra
    assert after.layers[1].window == 16
    assert after.layers[0] == after.layers[2] == LAYOUT.layers[0]
    assert [layer.qk_norm for layer in after.layers] == [False, True, False]


@pytest.mark.parametrize(
    "trained",
    [
        Temperature(1.0, reference=1),
        Temperature(0.1, reference=8, steps=True, per="query"),
        Temperature(0.2, scale=1.5),
        Temperature(0.1, 2.0, reference=C // 2),
    ],
)
@pytest.mark.parametrize("anneal_steps", [0, 2])
def test_a_drop_keeps_a_temperature_that_the_weights_were_trained_with(trained, anneal_steps):
    layers = (LayerEncoding.of_heads((Spectrum((1.0,), trained), TEMPERED)),)
    change, positional = ChangeConfig(anneal_steps=anneal_steps), PositionalConfig()
    after = dropped_layout(Layout(C, layers), positional, change, 2)
    if anneal_steps:
        after = shrunk(after, positional, change, 2, anneal_steps)
    assert after.layers[0].spectra == (Spectrum(temperature=trained), NOPE)
    own = Spectrum(temperature=Temperature(0.5, reference=2))
    assert drop(Layout(C, layers), to=own).spectra == (own,)


@pytest.mark.parametrize("head", [4, -5])
def test_a_head_that_does_not_exist_is_refused(head):
    with pytest.raises(ValueError, match=f"head {head} does not exist in a model of 4 key-value"):
        drop(LAYOUT, ChangeConfig(heads=[head]))


@pytest.mark.parametrize(
    ("limits", "factors"),
    [
        ({"slower_than": 16.001}, (1, 1, 0)),
        ({"slower_than": 15.999}, (1, 0, 0)),
        ({"faster_than": 16.001}, (0, 0, 1)),
        ({"faster_than": 15.999}, (0, 1, 1)),
        ({"slower_than": 20.0, "faster_than": 10.0}, (0, 1, 0)),
    ],
)
def test_pairs_beyond_a_limit_stand_still(limits, factors):
    after = drop(LAYOUT, ChangeConfig(**limits, heads=[0]))
    assert after.layers[0].spectra[0].inv_freq == left_of(PAIRS, *factors)
    assert after.layers[0].spectra[1:] == LAYOUT.layers[0].spectra[1:]


def test_pairs_that_take_exactly_so_many_tokens_still_turn():
    (turn,) = Spectrum((0.5,)).wavelengths
    layout = Layout(C, (LayerEncoding.of_heads((Spectrum((0.5,)),)),))
    assert drop(layout, ChangeConfig(slower_than=turn)) == layout
    assert drop(layout, ChangeConfig(faster_than=turn)) == layout


def test_long_frequencies_stand_still_with_the_others_and_go_with_the_last():
    slow = left_of(PAIRS, 0.5, 0.5, 0.5)
    grown = LongFrequencies(C, slow, ntk_aware(slow, C), growth=2.0)
    spectrum = Spectrum(PAIRS.inv_freq, rotary_scale=1.5, long=grown)
    layout = Layout(C, (LayerEncoding.of_heads((spectrum,)),))
    (slower,) = drop(layout, ChangeConfig(slower_than=20.0)).spectra
    assert slower.long.inv_freq == left_of(Spectrum(slow), 1, 1, 0)
    assert (slower.long.length, slower.long.growth, slower.rotary_scale) == (C, 2.0, 1.5)
    assert drop(layout, ChangeConfig(slower_than=1.0)).spectra == (NOPE,)


@pytest.mark.parametrize(
    ("done", "share"), [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25), (4, 0.0), (5, 0.0)]
)
def test_angles_shrink_linearly_to_the_drop(done, share):
    change = ChangeConfig(anneal_steps=4, layers=[0, 2])
    after = shrunk(LAYOUT, POSITIONAL, change, 6, done)
    frequencies = [layer.spectra[2].inv_freq for layer in after.layers]
    small = left_of(SLOWER, share, share, share) if share else ()
    assert frequencies == [small, SLOWER.inv_freq, small]
    assert [layer.window for layer in after.layers] == [16] * 3
    assert done < 4 or after == drop(LAYOUT, ChangeConfig(layers=[0, 2]))


@pytest.mark.parametrize(
    ("limits", "scales"), [({}, (1.375, 1.25, 1.125, 1.0)), ({"slower_than": 20.0}, (1.5,) * 4)]
)
def test_the_factor_on_rotated_channels_goes_with_the_angles(limits, scales):
    spectrum = Spectrum(PAIRS.inv_freq, rotary_scale=1.5)
    layout = Layout(C, (LayerEncoding.of_heads((spectrum,)),))
    change = ChangeConfig(anneal_steps=4, **limits)
    after = [shrunk(layout, POSITIONAL, change, 6, done).spectra[0] for done in (1, 2, 3, 4)]
    assert tuple(one.rotary_scale for one in after) == scales


def test_only_the_pairs_to_drop_shrink():
    change = ChangeConfig(anneal_steps=4, slower_than=20.0, heads=[0])
    head, other, *_ = shrunk(LAYOUT, POSITIONAL, change, 6, 1).layers[0].spectra
    assert head.inv_freq == left_of(PAIRS, 1, 1, 0.75)
    assert other == PAIRS
    assert shrunk(LAYOUT, POSITIONAL, change, 6, 4) == drop(LAYOUT, change)


@pytest.mark.parametrize(
    ("done", "turning"), [(0, 4), (2, 3), (4, 2), (5, 2), (6, 1), (8, 0), (9, 0)]
)
def test_heads_drop_from_the_last_one_on(done, turning):
    change = ChangeConfig(anneal_steps=8, anneal="heads", layers=[1])
    after = shrunk(LAYOUT, POSITIONAL, change, 6, done)
    assert [s.rotates for s in after.layers[1].spectra] == [i < turning for i in range(4)]
    assert after.layers[0] == LAYOUT.layers[0]


def test_a_configured_drop_replaces_encodings():
    after = dropped_layout(LAYOUT, POSITIONAL, ChangeConfig(layers=[-1], to="rope"), 6, True)
    (rope,) = build_layout(
        PositionalConfig(encodings={"rope": {"base": 100.0}}),
        num_layers=1, num_key_value_heads=1, head_dim=6, training_length=C,
    ).spectra  # fmt: skip
    assert after == drop(LAYOUT, ChangeConfig(layers=[2]), to=rope, qk_norm=True)
    assert dropped_layout(LAYOUT, POSITIONAL, ChangeConfig(), 6) == drop(LAYOUT)
    some = ChangeConfig(heads=[1], faster_than=20.0)
    assert dropped_layout(LAYOUT, POSITIONAL, some, 6) == drop(LAYOUT, some)


@pytest.mark.parametrize("anneal", ["angles", "heads"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": TemperatureConfig(coefficient=0.5, reference=1)},
        {"temperature": TemperatureConfig(coefficient=0.5, heads="free")},
        {"encodings": {"nope": {"temperature": 0.4}}},
    ],
)
def test_a_drop_in_steps_ends_with_the_temperature_of_a_drop_in_one(anneal, options):
    positional, change = PositionalConfig(**options), ChangeConfig(anneal=anneal, anneal_steps=4)
    at_once = dropped_layout(LAYOUT, positional, ChangeConfig(), 6)
    assert not at_once.spectra[0].temperature.is_none
    assert shrunk(LAYOUT, positional, change, 6, 4) == at_once


def test_a_temperature_of_free_heads_lets_other_heads_get_an_encoding_that_rotates():
    positional = PositionalConfig(
        layers=["nope", "rope"], temperature=TemperatureConfig(coefficient=0.1, heads="free")
    )
    after = dropped_layout(LAYOUT, positional, ChangeConfig(layers=[1], to="half_rope"), 8)
    assert after.layers[1].spectra[0].temperature.is_none


@pytest.mark.parametrize(("qk_norm", "norms"), [(True, [True, False, True]), (False, [False] * 3)])
def test_a_drop_in_steps_begins_with_the_norms_of_its_layers_alone(qk_norm, norms):
    change = ChangeConfig(layers=[0, 2], anneal_steps=4)
    after = dropped_layout(LAYOUT, POSITIONAL, change, 6, qk_norm)
    assert [layer.qk_norm for layer in after.layers] == norms
    assert after.spectra == LAYOUT.spectra


def test_an_encoding_that_cannot_be_had_is_refused():
    wrong = PositionalConfig(encodings={"rope": {"base": 1.0}})
    with pytest.raises(UserError, match="base must be greater than 1"):
        dropped_layout(LAYOUT, wrong, ChangeConfig(to="rope"), 6)
