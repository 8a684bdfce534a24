"""Every encoding against its paper or transformers; wrong settings against their messages."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.positional.examples import slowed
from tests.reference import attention_layer, turned, watch_attention
from trainer.commands import compose_words
from trainer.common.errors import UserError
from trainer.positional.config import PositionalConfig, spectrum_of
from trainer.positional.encodings import ENCODINGS, alibi_slopes, by_name, rope_id
from trainer.positional.rescaling import cope
from trainer.positional.spectrum import Spectrum, Temperature, cope_shares


def spectrum(name, head_dim=64, training_length=4096, **parameters):
    return by_name(name, head_dim, training_length, **parameters)


def hf_config(head_dim, **rope):
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rope_has_the_frequencies_of_transformers(head_dim, base):
    theirs = LlamaRotaryEmbedding(hf_config(head_dim, rope_type="default", rope_theta=base))
    ours = torch.tensor(spectrum("rope", head_dim, base=base).inv_freq)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "parameters", "same"),
    [
        ("rope", {"rotary_fraction": 0.25}, spectrum("rope", 16)),
        ("half_rope", {}, spectrum("rope", 32)),
        ("half_rope", {"base": 100.0}, spectrum("rope", 32, base=100.0)),
        ("high_frequency", {"base": 100.0}, spectrum("rope", base=100.0)),
        ("p_rope", {"base": 100.0, "p": 1}, spectrum("rope", base=100.0)),
        ("cope", {"base": 100.0, "clipped": 0}, spectrum("rope", base=100.0)),
        ("nope", {}, Spectrum()),
        ("alibi", {}, Spectrum(alibi=True)),
    ],
)
def test_an_encoding_that_is_another_of_other_size(name, parameters, same):
    assert spectrum(name, **parameters) == same


def test_scaled_angles_are_those_of_positions_that_lie_closer():
    """iRoPE's alpha (Frequency Entropy, Sec. 2.3): angle alpha m theta, as position alpha m."""
    plain = by_name("rope", 16, 512, base=1e4)
    scaled = by_name("rope", 16, 512, base=1e4, angle_scale=0.25)
    assert [8 * f for f in scaled.inv_freq] == pytest.approx([2 * f for f in plain.inv_freq])


def test_high_frequency_base_is_652_at_4096():
    slowest = spectrum("high_frequency", 64).inv_freq[-1]
    base = slowest ** (-32 / 31)
    assert round(base) == 652


def test_rope_id_is_the_code_of_appendix_a4():
    dim, length, ratio = 32, 4096, 32  # half of 64 channels; one cycle in 32 tokens
    logstart, logend = math.log(2 * math.pi / ratio), math.log(4 * math.pi / length)
    pos = torch.arange(0, dim // 2, dtype=torch.float64) / (dim // 2 - 1)
    published = (pos * (logend - logstart) + logstart).exp()
    ours = torch.tensor(spectrum("rope_id").inv_freq, dtype=torch.float64)
    torch.testing.assert_close(ours, published, rtol=1e-12, atol=0)


def test_defaults_are_those_of_the_papers():
    """RoPE-ID, App. A.4; Barbero et al.'s 0.75-RoPE; CoPE's 20 pairs."""
    assert spectrum("rope_id").temperature == Temperature(0.1, 2.0, reference=4096)
    assert spectrum("p_rope") == spectrum("p_rope", p=0.75)
    assert spectrum("cope") == spectrum("cope", clipped=20)


def test_rope_id_has_the_wavelengths_and_channels_that_are_configured():
    changed = spectrum("rope_id", fastest_wavelength=8.0, slowest_wavelength=512.0)
    wavelengths = [2 * math.pi / f for f in changed.inv_freq]
    assert wavelengths == pytest.approx([8 * 64 ** (m / 15) for m in range(16)])
    for fraction, dim in ((0.25, 16), (1.0, 64)):
        assert spectrum("rope_id", rotary_fraction=fraction).rotary_dim == dim
        assert spectrum("hope", rotary_fraction=fraction).rotary_dim == dim


def test_channels_that_rotate_are_a_whole_number_of_pairs():
    assert spectrum("rope", 100, rotary_fraction=0.14).rotary_dim == 14  # 14.000000000000002
    with pytest.raises(ValueError, match="even number of rotating channels, got 5"):
        spectrum("rope", 20, rotary_fraction=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("half_rope", 128), ("rope_id", 128)])
def test_attention_equals_a_float64_loop(tiny_decoder, name, length):
    """At 1.5 C, so that the temperature of RoPE-ID (App. A.4, codeblock 1) counts."""
    model = tiny_decoder(
        layers=[name], training_length=length, model={"num_hidden_layers": 1, "head_dim": 16}
    )
    tokens = length + length // 2
    x, y = watch_attention(model, torch.arange(tokens) % 50)
    if name == "half_rope":
        frequencies, factor = [10_000 ** (-m / 4) for m in range(4)], 1.0
    else:
        fast, slow = 2 * math.pi / 32, 4 * math.pi / length
        frequencies = [fast * (slow / fast) ** (m / 3) for m in range(4)]
        factor = (0.1 * math.log(max(tokens, length) / length) + 1) ** 2
    expected = attention_layer(
        x, model.layers[0].self_attn, 4, 2, lambda v, i: turned(v, i, frequencies), factor=factor
    )
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("rope", {"rotary_fraction": -1.0}),
        ("rope", {"rotary_fraction": 2.0}),
        ("rope", {"base": 0.0}),
        ("rope", {"base": -2.0}),
        ("p_rope", {"p": -0.25}),
        ("p_rope", {"p": 1.5}),
    ],
)
def test_parameters_without_a_meaning_are_refused(name, parameters):
    with pytest.raises(ValueError, match="expected a"):
        spectrum(name, **parameters)
    config = PositionalConfig(encodings={"mine": {"type": name, **parameters}})
    with pytest.raises(UserError, match=r"positional.encodings.mine: expected a"):
        spectrum_of(config, "drop.to", "mine", 64, 4096)


def test_rope_id_says_which_length_it_needs():
    assert rope_id(8, 66).inv_freq
    with pytest.raises(ValueError, match="more than 64 tokens, twice fastest_wavelength, got 64"):
        rope_id(8, 64)


@pytest.mark.parametrize(("p", "still"), [(0.25, 24), (0.3, 23), (0.5, 16), (1.0, 0)])
def test_p_rope_stops_the_slowest_pairs_like_transformers(p, still):
    config = hf_config(64, rope_type="proportional", rope_theta=10_000.0, partial_rotary_factor=p)
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    ours = torch.tensor(spectrum("p_rope", p=p).inv_freq)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert (ours == 0).sum() == still


def test_p_rope_keeps_the_whole_share_of_the_pairs():
    assert 0.58 * 50 < 29
    assert sum(f > 0 for f in spectrum("p_rope", 100, p=0.58).inv_freq) == 29


@given(
    st.sampled_from([16, 64, 128]), st.sampled_from([1e4, 5e5]), st.sampled_from([64, 1024, 4096])
)
def test_published_hope_is_rope_without_wavelengths_beyond_the_training_length(size, base, length):
    expected = []
    for m in range(size // 2):
        theta = base ** (-2 * m / size)
        expected.append(theta if 2 * math.pi / theta <= length else 0.0)
    assert spectrum("hope_published", size, length, base=base).inv_freq == pytest.approx(expected)


def test_hope_spans_two_pi_to_the_training_length_on_half_of_the_channels():
    wavelengths = [2 * math.pi / f for f in spectrum("hope", 64, 4096).inv_freq]
    assert len(wavelengths) == 16
    assert wavelengths[0] == pytest.approx(2 * math.pi)
    assert wavelengths[-1] == pytest.approx(4096)
    ratios = [b / a for a, b in itertools.pairwise(wavelengths)]
    assert ratios == pytest.approx([ratios[0]] * 15)


@pytest.mark.parametrize(("head_dim", "clipped"), [(128, 20), (64, 8), (16, 20), (16, 2)])
def test_cope_clips_the_slowest_pairs_as_published(head_dim, clipped):
    """github.com/hrlics/CoPE, ``LlamaRotaryEmbedding``; as an encoding and as a rescaling."""
    plain = torch.tensor(spectrum("rope", head_dim).inv_freq, dtype=torch.float64)
    count = min(clipped, len(plain))
    published = plain.clone()
    published[-count:] *= 0.5 * (1 + torch.linspace(0, math.pi, count, dtype=torch.float64).cos())
    encoding = spectrum("cope", head_dim, clipped=clipped)
    assert encoding.inv_freq == pytest.approx(published.tolist(), rel=1e-12, abs=1e-20)
    rescaling = slowed(cope, spectrum("rope", head_dim), 4.0, 4096, clipped=clipped)
    assert rescaling == encoding
    assert slowed(cope, spectrum("rope", head_dim), 1.0, 4096) == spectrum("rope", head_dim)


@pytest.mark.parametrize(("clipped", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 0)), (2, (1, 1, 0))])
def test_the_slowest_clipped_pair_does_not_rotate(clipped, shares):
    assert cope_shares(3, clipped) == shares
    with pytest.raises(ValueError, match="clipped: expected 0 or more"):
        cope_shares(3, -1)


def test_a_plugin_adds_an_encoding(tmp_path, monkeypatch):
    """A plugin may postpone annotations and define dataclasses."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from trainer.positional.encodings import encoding\n"
        "from trainer.positional.spectrum import Spectrum\n"
        "@dataclass\n"
        "class Anything:\n"
        "    number: int = 1\n"
        "@encoding\n"
        "def constant(training_length, *, pairs=1):\n"
        "    return Spectrum((1 / training_length,) * pairs)\n"
    )
    monkeypatch.setitem(ENCODINGS, "constant", None)  # forgotten after the test
    compose_words([f"plugins=[{plugin}]"])
    assert spectrum("constant", 8, 4, pairs=3).inv_freq == (0.25,) * 3


@pytest.mark.parametrize("heads", [1, 2, 3, 9, 12, 16, 25])
def test_slopes_are_those_of_the_published_code(heads):
    """github.com/ofirpress/attention_with_linear_biases, ``get_slopes``."""

    def published(n):
        if (n & (n - 1)) == 0:
            start = 2 ** (-8 / n)
            return [start * start**i for i in range(n)]
        closest = 1 << (n.bit_length() - 1)
        return published(closest) + published(2 * closest)[0::2][: n - closest]

    assert alibi_slopes(heads) == pytest.approx(published(heads), rel=1e-12)


@pytest.mark.parametrize(
    ("positional", "slopes"),
    [
        ({"layers": ["alibi"]}, [2**-2, 2**-4, 2**-6, 2**-8]),
        ({"layers": ["nope"], "heads": {"alibi": 0.5}}, [0, 0, 2**-6, 2**-8]),
    ],
    ids=["all heads", "half of the heads"],
)
def test_biased_attention_equals_a_float64_loop(tiny_decoder, positional, slopes):
    model = tiny_decoder(**positional, model={"num_hidden_layers": 1})
    x, y = watch_attention(model, torch.arange(40))
    expected = attention_layer(
        x, model.layers[0].self_attn, 4, 2, bias=lambda head, i, j: -slopes[head] * (i - j)
    )
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
