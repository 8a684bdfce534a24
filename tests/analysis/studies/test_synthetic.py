"""Spectra in principle, against an explicit rotation of an explicit cloud."""

import numpy as np
import pytest
import torch

from trainer.analysis.synthetic import limit, standard_spectra, synthetic_decay, synthetic_section
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import make_spectrum
from trainer.positional.rotation import rotary_table, rotate


def layout_of(*names, C=64, D=16, **more):
    config = PositionalConfig(layers=list(names), **more)
    return build_layout(
        config, num_layers=len(names), num_key_value_heads=2, head_dim=D, training_length=C
    )


def test_curves_are_the_singular_values_of_a_rotated_cloud():
    numbers = synthetic_section(layout_of("half_rope"), 16).numbers
    cloud = torch.ones(1, 1, 64, 16)
    turned = rotate(cloud, *rotary_table(make_spectrum("half_rope", 16, 64, {}), torch.arange(64)))
    expected = np.linalg.norm(turned[0, 0].double().numpy(), 2) / np.linalg.norm(cloud[0, 0], 2)
    at = numbers["lengths"].index(64)
    assert numbers["fsv_ratio"]["this model"][at] == pytest.approx(expected, abs=1e-5)
    decay = turned[0, 0, 0] @ turned[0, 0, 37] / 16
    at = numbers["distances"].index(37)
    assert numbers["decay"]["this model"][at] == pytest.approx(float(decay), abs=1e-5)


@pytest.mark.parametrize("name", ["rope", "half_rope", "high_frequency", "p_rope", "nope"])
def test_the_limit_is_where_the_ratio_goes(name):
    spectrum = make_spectrum(name, 16, 64, {"base": 1e3} if name == "rope" else {})
    far = synthetic_decay(spectrum, 16, [10**7], [0], training_length=64).fsv_ratio[0]
    assert limit(spectrum, 16) == pytest.approx(far, abs=1e-3)


def test_the_two_criteria_are_told_apart():
    said = {line.split(":")[0]: line for line in synthetic_section(layout_of("rope"), 16).findings}
    assert list(said) == ["this model", "RoPE", "HalfRoPE", "high frequency", "RoPE-ID"]
    stands = "Channels that stand still keep 0.71"
    assert stands in said["RoPE-ID"]
    assert "reached within" in said["RoPE-ID"].replace("not reached", "")
    assert stands in said["HalfRoPE"]
    assert "not reached within" in said["HalfRoPE"]
    assert "Every channel rotates, which leaves 0.25" in said["RoPE"]


def test_the_spectra_of_most_heads_stand_for_the_model():
    layout = layout_of("rope", "rope", "nope", "rope_id", "rope_id", "rope_id", C=512)
    section = synthetic_section(layout, 16)
    names = [name for name in section.numbers["spectra"] if name.startswith("this")]
    assert names == ["this model", "this model, 2"]
    spectra = section.numbers["spectra"]
    assert spectra["this model"] == list(make_spectrum("rope_id", 16, 512, {}).inv_freq)
    assert spectra["this model, 2"] == spectra["RoPE"]


def test_nothing_rotates_and_nothing_is_dispersed():
    section = synthetic_section(layout_of("nope"), 16)
    assert set(section.numbers["fsv_ratio"]["this model"]) == {1.0}
    assert "nothing is dispersed" in section.findings[0]


@pytest.mark.parametrize(("D", "C"), [(2, 4), (6, 64), (8, 8), (16, 9), (128, 4096)])
def test_small_models_have_the_spectra_that_fit_them(D, C):
    spectra = standard_spectra(D, C)
    assert "RoPE" in spectra
    assert all(s.rotary_dim <= D for s in spectra.values())
    synthetic_section(layout_of("rope", C=C, D=D), D)
