"""Layouts of configurations, and messages about wrong ones."""

import pytest

from trainer.common.errors import UserError
from trainer.positional.config import PositionalConfig, TemperatureConfig, build_layout
from trainer.positional.encodings import by_name
from trainer.positional.spectrum import Temperature


def layout(*, depth=4, kv_heads=4, qk_norm=False, **config):
    return build_layout(
        PositionalConfig(**config),
        num_layers=depth,
        num_key_value_heads=kv_heads,
        head_dim=8,
        training_length=512,
        qk_norm=qk_norm,
    )


def spectrum(name, **parameters):
    return by_name(name, 8, 512, **parameters)


ROPE, NOPE = spectrum("rope"), spectrum("nope")


def test_irope_repeats_over_the_depth():
    built = layout(depth=6, layers=["rope", "rope", "rope", "nope"])
    assert [layer.spectra[0] for layer in built.layers] == [ROPE, ROPE, ROPE, NOPE, ROPE, ROPE]


def test_rnope_swa_has_windows_on_its_rope_layers_only():
    built = layout(depth=8, layers=["rope", "rope", "rope", "nope"], windows=[128, 128, 128, None])
    assert [layer.window for layer in built.layers] == [128, 128, 128, None] * 2
    assert [layer.spectra[0] == NOPE for layer in built.layers] == [False, False, False, True] * 2


def test_windows_repeat_by_themselves_whatever_the_number_of_encodings():
    built = layout(depth=5, layers=["rope", "nope"], windows=[4, 8, None])
    assert [layer.window for layer in built.layers] == [4, 8, None, 4, 8]
    assert [layer.spectra[0] for layer in built.layers] == [ROPE, NOPE, ROPE, NOPE, ROPE]


def test_a_temperature_is_of_all_heads_or_of_those_without_rotation_and_alibi():
    tempered = {"coefficient": 0.1, "reference": 64, "steps": True}
    expected = Temperature(0.1, 1.0, 1.0, "query", 64, True)
    for heads, encoded in (("all", expected), ("free", Temperature())):
        built = layout(
            layers=["rope", "nope", "alibi"], temperature=TemperatureConfig(**tempered, heads=heads)
        )
        temperatures = [layer.spectra[0].temperature for layer in built.layers]
        assert temperatures == [encoded, expected, encoded, encoded]
    assert layout(temperature=TemperatureConfig()) == layout()
    (scaled,) = layout(temperature=TemperatureConfig(scale=2.0)).spectra
    assert scaled.temperature.scale == 2.0


def test_a_temperature_beside_one_of_an_encoding_is_refused():
    with pytest.raises(UserError, match="encoding rope_id has one of its own"):
        layout(layers=["rope_id"], temperature=TemperatureConfig(coefficient=0.1))


@pytest.mark.parametrize(
    ("kv_heads", "share", "count"),
    [(4, 0.5, 2), (4, 0.0, 0), (4, 1.0, 4), (3, 0.333, 1), (3, 0.667, 2), (25, 0.28, 7)],
)
def test_a_share_of_heads_is_the_last_ones(kv_heads, share, count):
    built = layout(kv_heads=kv_heads, heads={"nope": share})
    expected = (ROPE,) * (kv_heads - count) + (NOPE,) * count
    assert {layer.spectra for layer in built.layers} == {expected}


def test_shares_of_heads_follow_the_configured_order():
    built = layout(heads={"nope": 0.25, "alibi": 0.25})
    assert built.layers[0].spectra == (ROPE, ROPE, NOPE, spectrum("alibi"))


def test_an_encoding_beyond_the_depth_is_not_built():
    """It would be refused."""
    built = layout(depth=1, layers=["rope", "mine"], encodings={"mine": {"type": "rope", "p": 2}})
    assert built.spectra == (ROPE,)


def test_a_variant_has_separate_parameters():
    built = layout(
        layers=["local", "global"],
        encodings={"local": {"type": "rope", "base": 1e2}, "global": {"type": "rope", "base": 1e6}},
    )
    bases = [layer.spectra[0] for layer in built.layers[:2]]
    assert bases == [spectrum("rope", base=1e2), spectrum("rope", base=1e6)]


@pytest.mark.parametrize("qk_norm", [True, False])
def test_every_layer_starts_with_the_qk_norm_of_the_model(qk_norm):
    assert {layer.qk_norm for layer in layout(qk_norm=qk_norm).layers} == {qk_norm}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"layers": ["rppe"]}, "layers"),
        ({"heads": {"rppe": 0.5}}, "heads"),
        ({"encodings": {"rppe": {}}}, "encodings.rppe"),
        ({"encodings": {"mine": {"type": "rppe"}}}, "encodings.mine"),
        ({"encodings": {"rope": {"bsae": 1.0}}}, "encodings.rope"),
        ({"heads": {"nope": 0.3}}, "heads.nope"),
        ({"heads": {"nope": 0.26}}, "heads.nope"),
        ({"heads": {"nope": 0.5, "alibi": 1.0}}, "heads"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_refused_by_its_key(config, key):
    with pytest.raises(UserError, match=f"^positional.{key}: "):
        layout(**config)
