"""Attention under another layout, against plain attention; factors against the frequencies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis.positional_bias import rescaling as module
from trainer.analysis.positional_bias.rescaling import (
    attention_by_distance,
    scaling_factors,
)
from trainer.positional.encodings import make_spectrum


def test_figure_6_all_methods_compress_the_low_frequencies():
    """Fast pairs stay but for PI's, slow ones are divided by s."""
    factors = scaling_factors(make_spectrum("rope", 64, 2048, {}), 2048, 2.0)
    np.testing.assert_allclose(factors["pi"], 0.5)
    np.testing.assert_allclose(factors["ntk"], 2 ** (-np.arange(32) / 31))  # Eq. 3, m from 0
    assert factors["yarn"][0] == 1
    for gamma in (factors[name] for name in ("pi", "ntk", "yarn")):
        assert gamma[-1] == pytest.approx(0.5)
        assert (np.diff(gamma) <= 1e-12).all()


@pytest.mark.parametrize("s", [2.0, 3.0, 4.0])
def test_figures_6_and_11_have_yarns_ramp_over_the_frequency(s):
    """Eq. 11, p = 1 and q = 32 turns."""
    spectrum = make_spectrum("rope", 64, 2048, {})
    expected = []
    for omega in spectrum.inv_freq:
        turns = 2048 * omega / (2 * np.pi)
        kappa = min(max((turns - 1) / 31, 0.0), 1.0)
        expected.append((1 - kappa) / s + kappa)
    np.testing.assert_allclose(scaling_factors(spectrum, 2048, s)["yarn"], expected)


def test_a_pair_that_stands_still_has_factor_one():
    factors = scaling_factors(make_spectrum("p_rope", 16, 64, {"p": 0.5}), 64, 4.0)
    assert all((gamma[4:] == 1).all() for gamma in factors.values())


def test_profile_by_distance(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    heads = layer_of_heads(window=30)
    measured = attention_by_distance(heads, 3, 35)
    maps = [attention_of(heads, text, 3)[0] for text in range(2)]
    expected = [np.mean([a.diagonal(-back) for a in maps]) for back in range(35)]
    np.testing.assert_allclose(measured, expected, rtol=1e-4, atol=1e-7)
    assert len(attention_by_distance(heads, 0, 1000)) == 40
