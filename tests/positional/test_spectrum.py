"""A spectrum is plain data: wavelengths, temperature, JSON."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.positional.spectrum import LongFrequencies, Spectrum, Stretch, Temperature

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


@given(spectra)
def test_a_spectrum_survives_json(spectrum):
    assert Spectrum.from_dict(json.loads(json.dumps(spectrum.to_dict()))) == spectrum


def test_a_pair_turns_once_in_its_wavelength():
    spectrum = Spectrum((math.pi, math.pi / 8, 0.0))
    assert spectrum.wavelengths == (2, 16, math.inf)
    assert spectrum.rotary_dim == 6


def test_only_a_moving_pair_makes_a_rotation():
    assert Spectrum((0.0, 0.1)).rotates
    assert not Spectrum((0.0, 0.0)).rotates
    assert not Spectrum().rotates


@given(temperatures, st.integers(1, 4096), st.integers(0, 4096))
def test_inside_the_training_length_the_temperature_is_its_scale(temperature, length, shorter):
    at = temperature.at(max(length - shorter, 0), training_length=length)
    assert at.scale == pytest.approx(temperature.scale)
    assert at == temperature or at.is_constant


@pytest.mark.parametrize("stretch", [1, 2, 5.5, 64])
def test_published_temperatures(stretch):
    length = round(4096 * stretch)
    rope_id = Temperature(coefficient=0.1, exponent=2).at(length, 4096).scale
    assert rope_id == pytest.approx((1 + 0.1 * math.log(max(length, 4096) / 4096)) ** 2, rel=1e-12)
    drope = Temperature(coefficient=0.412).at(length, 4096).scale
    assert drope == pytest.approx(1 + 0.412 * math.log(stretch), rel=1e-12)


def test_replacing_a_field_of_the_temperature_keeps_the_rest():
    before = Spectrum((0.5,), Temperature(0.1, 2.0))
    after = before.with_temperature(scale=1.5)
    assert after == Spectrum((0.5,), Temperature(0.1, 2.0, 1.5))
