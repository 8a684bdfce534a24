"""Every method that derives something from C, the base or the first frequency, where the model has
been extended before: in a second longer phase, on a spectrum that is rescaled already, and on
frequencies that were never geometric. Each against a few plain lines of its paper."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.positional.examples import encoded, one_layer, slowed
from trainer.config import (
    ChangeConfig,
    DataConfig,
    RescaleConfig,
    RunConfig,
)
from trainer.model.config import ModelConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout
from trainer.positional.rescaling import (
    RESCALINGS,
    dynamic,
    llama3,
    ntk_aware,
    yarn,
)
from trainer.runs.phases import layout_of_phase, phases_of

C, LATER, LAST = 4096, 32_768, 131_072
"""RoPE-ID, App. A.9: trained at 4k, tuned at 32k and then at 128k."""
FIRST, SECOND = LATER / C, LAST / LATER


def spectrum_of(name="rope", head_dim=64, **parameters):
    return by_name(name, head_dim, C, **parameters)


def after_phase(layout, length, **changes):
    """A layout at the beginning of a phase with sequences of ``length`` tokens."""
    config = RunConfig(data=DataConfig(sequence_length=length))
    (phase,) = phases_of(config)
    return layout_of_phase(config, replace(phase, **changes), layout)


def tuned(spectrum, *lengths, method=None):
    """The spectrum after phases of these lengths, each with the rescaling."""
    layout = one_layer(C, spectrum)
    for length in lengths:
        layout = after_phase(layout, length, rescale=RescaleConfig(method) if method else None)
    assert layout.training_length == lengths[-1]
    return layout.spectra[0]


def turns(inv_freq, length):
    return np.array(inv_freq) * length / (2 * math.pi)


SCALED = {
    "YaRN": slowed(yarn, spectrum_of(), FIRST, C),
    "Llama 3.1": slowed(llama3, spectrum_of(head_dim=128, base=5e5), FIRST, C),
    "RoPE-ID": spectrum_of("rope_id"),
    "high-frequency RoPE": slowed(yarn, spectrum_of("high_frequency"), FIRST, C),
    "p-RoPE": slowed(yarn, spectrum_of("p_rope"), FIRST, C),
}
"""Spectra of models that were trained at LATER tokens."""
scaled = pytest.mark.parametrize("spectrum", SCALED.values(), ids=SCALED)


@pytest.mark.parametrize("base", [1e4, 5e5])
def test_ntk_aware_scaling_twice_is_one_larger_base(base):
    """bloc97: the base is multiplied by s^(d / (d - 2)), here with s = 32."""
    larger = base * 32 ** (64 / 62)
    expected = [larger ** (-2 * m / 64) for m in range(32)]
    rescaled = tuned(spectrum_of(base=base), LATER, LAST, method="ntk").inv_freq
    assert rescaled == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "slow", "fast"),
    [("ntk_by_parts_turns", 1, 32), ("yarn_turns", 1, 32), ("llama3", 1, 4)],
)
@scaled
def test_published_ramps_count_turns_in_the_longest_sequences(spectrum, method, slow, fast):
    """Peng et al.: gamma(r) = (r - alpha) / (beta - alpha), r = C theta / 2 pi."""
    share = np.clip((turns(spectrum.inv_freq, LATER) - slow) / (fast - slow), 0, 1)
    expected = np.array(spectrum.inv_freq) * (share + (1 - share) / SECOND)
    rescaled = slowed(RESCALINGS[method], spectrum, SECOND, LATER).inv_freq
    assert rescaled == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["yarn", "yarn_turns"])
def test_yarns_attention_factor_is_that_of_the_whole_extension(method):
    """Peng et al.: sqrt(1 / t) = 0.1 ln s + 1 with s = L' / L, L the length of pretraining."""
    spectrum = spectrum_of()
    for length, lengths in ((LATER, [LATER]), (LAST, [LATER, LAST])):
        extended = tuned(spectrum, *lengths, method=method)
        assert extended.rotary_scale == pytest.approx(0.1 * math.log(length / C) + 1, rel=1e-12)
    # A schedule that follows the length sets out from the factor that the model has.
    following = dynamic(extended, RESCALINGS[method], LAST)
    for n in (C, LAST, 2 * LAST, 5 * LAST):
        scale = following.at(n, LAST).rotary_scale
        assert scale == pytest.approx(0.1 * math.log(max(n, LAST) / C) + 1, rel=1e-12)


def test_the_full_range_goes_from_the_fastest_to_the_slowest_frequency_in_every_stage():
    """RoPE-ID, App. A.9: "the highest frequency is unchanged, and the lowest frequency scales up by
    L'/L"; between them the share that is kept is linear in the logarithm of the frequency."""
    expected, extended = np.array(spectrum_of("rope_id").inv_freq), spectrum_of("rope_id")
    for factor, length in ((FIRST, C), (SECOND, LATER)):
        low, high = math.log(expected[-1]), math.log(expected[0])
        share = (np.log(expected) - low) / (high - low)
        expected = expected * (share + (1 - share) / factor)
        extended = slowed(RESCALINGS["yarn_full_range"], extended, factor, length)
        assert extended.inv_freq == pytest.approx(expected, rel=1e-9)
    assert extended.inv_freq[0] == spectrum_of("rope_id").inv_freq[0]
    assert extended.inv_freq[-1] == pytest.approx(spectrum_of("rope_id").inv_freq[-1] / 32)
    assert extended.rotary_scale == 1


def dynamic_ntk(before, n, length, alpha):
    """emozilla; DoPE, App. A.2: the base times (alpha n / C - (alpha - 1))^(d / (d - 2))."""
    s = alpha * max(n, length) / length - (alpha - 1)
    d = 2 * len(before)
    return [f * s ** (-2 * m / (d - 2)) for m, f in enumerate(before)]


@pytest.mark.parametrize("alpha", [1.0, 8.0])
def test_dynamic_ntk_keeps_its_length_in_a_longer_phase(alpha):
    """A published model with ``rope_type: dynamic`` that is tuned further: its frequencies at 32k
    are the same before the phase and in it."""
    plain = spectrum_of()
    model = one_layer(C, dynamic(plain, ntk_aware, C, alpha))
    later = Layout.from_dict(after_phase(model, LATER).to_dict())
    q, k = torch.randn(2, 1, 1, 8, 64, generator=torch.Generator().manual_seed(0))
    for n in (1, C, C + 1, LATER, LAST):
        expected = dynamic_ntk(plain.inv_freq, n, C, alpha)
        for layout in (model, later):
            assert layout.at(n).spectra[0].inv_freq == pytest.approx(expected, rel=1e-12)
        positions = torch.arange(n, n + 8) - 8
        both = [encoded(q, k, layout, positions, n) for layout in (model, later)]
        assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    ("spectrum", "length"),
    [
        (spectrum_of("rope_id"), C),  # App. A.9: stored
        (spectrum_of("nope", temperature=0.4), LATER),  # DroPE, App. C.2: fitted after training
        (spectrum_of().with_temperature(coefficient=0.4), LATER),
        (spectrum_of().with_temperature(coefficient=0.4, reference=2048), 2048),
    ],
)
def test_a_temperature_refers_to_its_own_length_or_to_the_longest_of_training(spectrum, length):
    after = tuned(spectrum, LATER)
    c, exponent = spectrum.temperature.coefficient, spectrum.temperature.exponent
    for n in (1024, C, LATER, LAST):
        expected = (1 + c * math.log(max(n, length) / length)) ** exponent
        assert after.at(n, LATER).temperature.scale == pytest.approx(expected, rel=1e-12)


def test_an_encoding_that_a_longer_phase_begins_with_is_written_for_its_length(tiny_decoder):
    """RoPE-ID, Sec. 4 and App. A.4: wavelengths to C / 2, base C / 2 pi for high-frequency RoPE."""
    layout = tiny_decoder(training_length=256).layout
    for name in ("rope_id", "high_frequency", "hope"):
        after = after_phase(layout, 1024, drop=ChangeConfig(to=name))
        head_dim = ModelConfig().head_size
        assert after == one_layer_like(layout, by_name(name, head_dim, 1024))


def one_layer_like(layout, spectrum):
    """The layout with the spectrum everywhere, at 1,024 tokens."""
    return replace(layout.map(lambda _: spectrum), training_length=1024)
