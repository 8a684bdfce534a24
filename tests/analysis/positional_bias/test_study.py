"""The section about positional bias: its numbers against loops, autograd and closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests.analysis.attention_examples import attention_of
from tests.analysis.positional_bias.test_measure import dense_gradients, weights
from trainer.analysis.capture import NeedlePrompt, capture
from trainer.analysis.positional_bias import measure as fresh_module
from trainer.analysis.positional_bias.measure import encoded_layout, fresh_decoders
from trainer.analysis.positional_bias.rescaling import (
    attention_around,
    factors_part,
    needle_part,
    rank_correlation,
    yarn_shift,
)
from trainer.analysis.positional_bias.study import PositionalBiasStudy, heads_part
from trainer.analysis.studies.study import Target, run
from trainer.model.config import QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import make_spectrum
from trainer.positional.rescaling import yarn_turns
from trainer.positional.spectrum import Spectrum

IDS = torch.randint(50, (2, 48), generator=torch.Generator().manual_seed(0))


def captured(model, ids, layout=None):
    heads = []
    with model.using(layout or model.layout):
        capture(model, ids, heads.append)
    return heads


def section_of(model):
    target = Target("tiny", model, IDS)
    return run([PositionalBiasStudy(target)], target)[0]


@pytest.fixture
def rope(tiny_decoder):
    return tiny_decoder(training_length=32)


@pytest.fixture
def section(rope):
    return section_of(rope)


def test_bias_is_that_of_the_first_tokens_up_to_the_training_length(rope, section):
    for layer, heads in enumerate(captured(rope, IDS)):
        for head in range(4):
            for shift, kind in enumerate(("diagonal", "previous")):
                maps = [attention_of(heads, text, head)[0][:32, :32] for text in range(2)]
                expected = np.mean([(weights(32, shift) * a).sum() / 32 for a in maps])
                assert section.numbers[kind][layer][head] == pytest.approx(expected, abs=1e-5)


def test_a_temperature_of_long_texts_does_not_change_the_bias_within(rope):
    """RoPE-ID and DroPE sharpen attention in texts longer than the training length."""
    bias = PositionalBiasStudy(Target("tiny", rope, IDS[:, :32]))._bias()
    rope.layout = rope.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=2.0))
    measured = PositionalBiasStudy(Target("tiny", rope, IDS))._bias()
    for kind, values in bias.items():
        np.testing.assert_allclose(measured[kind], values, atol=1e-6)


def test_findings_name_the_strongest_heads_and_count_positional_ones():
    bias = {
        "diagonal": np.array([[0.0, 0.1], [0.7, 0.5]]),
        "previous": np.array([[0.9, 0.1], [0.0, -0.2]]),
    }
    diagonal, previous = heads_part(bias).findings
    assert (
        "its own token, layer 1 head 0 leans most, Aᶜ = 0.700; 2 of 4 heads reach 0.5" in diagonal
    )
    assert "the previous token, layer 0 head 0 leans most, Aᶜ = 0.900; 1 of 4" in previous
    assert "the mean is 0.200" in previous


def test_fresh_decoders_have_the_model_s_shape_and_normal_weights(rope):
    """Against autograd in a decoder that is built here, and a loop over prefixes."""
    measured = fresh_decoders(rope, IDS)
    words, text = torch.unique(IDS[:1, :32], return_inverse=True)
    for version, kind in (("encoded", "rope"), ("nope", "nope")):
        layout = rope.layout.map(lambda _, kind=kind: make_spectrum(kind, 8, 32, {}))
        config = replace(rope.config, vocab_size=len(words), initializer="normal")
        config = replace(config, initializer_by_depth=False)
        for seed in range(3):
            decoder = Decoder(config, layout, seed)
            for shift in (0, 1):
                query, key = dense_gradients(decoder, text, shift)
                np.testing.assert_allclose(
                    measured.gradients[version][seed, shift],
                    np.hypot(query, key).mean(axis=1),
                    rtol=1e-3,
                )
            x = decoder.embed_tokens(text)[0].detach().double()
            assert x.std() == pytest.approx(0.02, rel=0.1)
            x = x / (x.square().mean(-1, keepdim=True) + rope.config.rms_norm_eps).sqrt()
            widest = max(
                (x[: i + 1].mean(0) - x[j]).norm().item() for i in range(32) for j in range(i + 1)
            )
            assert measured.spreads[version][seed, 0] == pytest.approx(widest, rel=1e-5)


def test_a_shape_that_is_too_large_is_not_built(rope, monkeypatch):
    monkeypatch.setattr(fresh_module, "BUDGET", 1e6)
    assert fresh_decoders(rope, IDS) is None
    section = section_of(rope)
    assert any("Gradients before training were left out" in text for text in section.findings)
    assert set(section.numbers["prefix_spread"]) == {"model"}


def test_a_smaller_budget_means_fewer_seeds(rope, monkeypatch):
    cost = fresh_module._cost_of_a_token(rope)
    monkeypatch.setattr(fresh_module, "BUDGET", 2.5 * 32 * cost)
    assert fresh_decoders(rope, IDS).gradients["nope"].shape == (2, 2, 2)


def test_the_version_with_positions(tiny_decoder):
    """Its own encoding, or RoPE where it has none."""
    rope, nope = tiny_decoder(layers=["rope"]), tiny_decoder(layers=["nope"])
    assert encoded_layout(rope) == ("RoPE", rope.layout)
    name, layout = encoded_layout(nope)
    assert name == "RoPE, base 10,000"
    assert layout.spectra == (make_spectrum("rope", 8, 32, {}),)
    assert encoded_layout(tiny_decoder(layers=["half_rope"]))[0] == "own encoding"
    assert encoded_layout(tiny_decoder(layers=["alibi"]))[0] == "own encoding"


@pytest.mark.parametrize(("when", "differ"), [("after_drop", False), ("always", True)])
def test_norms_are_on_as_they_are_when_a_run_begins(tiny_decoder, when, differ):
    """Those that come on at the drop are off: the numbers are those of a model without norms."""
    plain = tiny_decoder(layers=["nope"])
    config = replace(plain.config, qk_norm=QKNormConfig(when))
    layers = tuple(replace(layer, qk_norm=True) for layer in plain.layout.layers)
    normed = Decoder(config, replace(plain.layout, layers=layers))
    measured, expected = fresh_decoders(normed, IDS), fresh_decoders(plain, IDS)
    for version, values in expected.gradients.items():
        assert (not np.allclose(measured.gradients[version], values)) is differ


def test_attention_around_an_earlier_occurrence(rope):
    text = torch.cat([IDS[:, :11], IDS[:, 1:11]], dim=1)
    heads = captured(rope, text)[1]
    measured = attention_around(heads, 2, 10, 3)
    for index, offset in enumerate(range(-3, 4)):
        expected = [
            attention_of(heads, row, 2)[0][i, i - 10 + offset]
            for row in range(2)
            for i in range(11, 21)
            if i - 10 + offset >= 0
        ]
        assert measured[index] == pytest.approx(np.mean(expected), rel=1e-4)


def test_yarn_moves_attention_by_so_much(rope):
    """Total variation between rows of plain attention under both layouts, on repeated text."""
    bias = np.zeros((2, 4))
    bias[1, 2] = 0.9
    measured = yarn_shift(rope, IDS, bias)
    half = 15
    assert (measured.half, measured.positional) == (half, (1, 2))
    text = torch.cat([IDS[:, : half + 1], IDS[:, 1 : half + 1]], dim=1)
    scaled = rope.layout.rescaled(yarn_turns, 2.0)
    recall = np.zeros((2, 4))
    for layer in range(2):
        readings = [captured(rope, text, layout)[layer] for layout in (rope.layout, scaled)]
        for head in range(4):
            plain, other = (
                np.stack([attention_of(heads, row, head)[0] for row in range(2)])
                for heads in readings
            )
            expected = np.abs(plain - other)[:, half + 1 :].sum(-1).mean() / 2
            assert measured.shift[layer, head] == pytest.approx(expected, rel=1e-3)
            second = range(half + 1, 2 * half + 1)
            recall[layer, head] = np.mean(
                [plain[:, i, i - half] + plain[:, i, i - half + 1] for i in second]
            )
            if (layer, head) == measured.positional:
                distances = [np.mean(other.diagonal(-back, 1, 2)) for back in range(half)]
                np.testing.assert_allclose(measured.profile["yarn"], distances, rtol=1e-3)
    np.testing.assert_allclose(measured.recall, recall, rtol=1e-3)
    recall[1, 2] = 0
    assert measured.semantic == np.unravel_index(recall.argmax(), recall.shape)
    layer, head = measured.semantic
    for name, layout in (("trained", rope.layout), ("yarn", scaled)):
        near = attention_around(captured(rope, text, layout)[layer], head, half, 8)
        np.testing.assert_allclose(measured.near_repeat[name], near, rtol=1e-3)
    assert measured.uniform == pytest.approx(np.mean([2 / (i + 1) for i in second]))


def test_findings_about_yarn_are_its_numbers(section):
    shift = np.array(section.numbers["yarn"]["shift"])
    positional, semantic = (
        shift[tuple(section.numbers["yarn"][f"{name}_head"])] for name in ("positional", "semantic")
    )
    (finding,) = [text for text in section.findings if text.startswith("YaRN with s = 2 puts")]
    assert f"puts {100 * positional:.1f}% of the attention" in finding
    assert f"and {100 * semantic:.1f}% of the attention of" in finding
    assert f"{semantic / positional:.2g} times as much" in finding
    bias = np.maximum(section.numbers["diagonal"], section.numbers["previous"])
    expected = spearmanr(bias.ravel(), shift.ravel()).statistic
    assert section.numbers["yarn"]["rank_correlation"] == pytest.approx(expected)
    (finding,) = [text for text in section.findings if "rank correlation" in text]
    assert f"Over all {bias.size} heads" in finding
    assert f"YaRN moves is {expected:+.2f}" in finding


def test_the_last_token_of_a_needle_prompt_under_yarn(rope):
    """Fig. 8: plain attention of the last query on the tokens around the needle, under both."""
    prompt = NeedlePrompt(IDS[:, :32], slice(5, 9))
    part = needle_part(rope, prompt)
    measured, (picture,) = part.numbers["needle"], part.pictures
    maps = {}
    for name, layout in (("trained", rope.layout), ("yarn", rope.layout.rescaled(yarn_turns, 2.0))):
        layers = captured(rope, prompt.ids, layout)
        maps[name] = np.array(
            [
                [
                    np.mean([attention_of(h, row, head)[0][-1] for row in range(2)], axis=0)
                    for head in range(4)
                ]
                for h in layers
            ]
        )
    on_needle = maps["trained"][..., 5:9].sum(-1)
    assert measured["head"] == np.unravel_index(on_needle.argmax(), on_needle.shape)
    assert (picture.rows[0][1], measured["tokens"]) == (-5, 32)
    (finding,) = part.findings
    for name, values in maps.items():
        expected = values[measured["head"]]
        np.testing.assert_allclose(measured["around"][name], expected[:17], rtol=1e-3)
        assert measured["on_needle"][name] == pytest.approx(expected[5:9].sum(), rel=1e-3)
        assert f"{100 * measured['on_needle'][name]:.1f}%" in finding


def test_without_a_needle_the_page_says_so(section):
    assert any("Attention on a needle under YaRN was left out" in x for x in section.findings)


def test_yarn_leaves_the_layout_alone_and_chooses_heads_that_rotate(tiny_decoder):
    model = tiny_decoder(layers=["rope", "nope"])
    layout = model.layout
    bias = np.array([[0.1] * 4, [0.9] * 4])
    measured = yarn_shift(model, IDS, bias)
    assert model.layout is layout
    assert (measured.positional[0], measured.semantic[0]) == (0, 0)
    assert measured.positional != measured.semantic
    assert yarn_shift(model, IDS[:, :18], bias) is None


def test_a_model_without_rotation_has_the_other_parts(tiny_decoder):
    section = section_of(tiny_decoder(layers=["nope"]))
    assert any("No head of this model rotates" in finding for finding in section.findings)
    assert {picture.name for picture in section.pictures} == {
        "positional_bias_heads",
        "positional_bias_gradients",
        "prefix_spread",
    }


def test_factors_of_pairs_that_turn_slowly():
    """Base 10^4, 4 pairs, C = 64: wavelengths 6.3, 63, 628 and 6283 tokens."""
    slow, fast = factors_part(make_spectrum("rope", 8, 64, {}), 64).findings
    assert slow.startswith("2 of 4 pairs make less than one turn")
    ntk = [2 ** (-m / 3) for m in range(4)]
    assert f"PI 0.50, NTK-aware {np.mean(ntk[2:]):.2f}" in slow
    assert fast.startswith("2 of 4 pairs make a turn or more")
    assert f"PI 0.50, NTK-aware {np.mean(ntk[:2]):.2f}" in fast


def test_pairs_that_stand_still_are_not_counted():
    (finding,) = factors_part(Spectrum((1.0, 0.5, 0.0)), 64).findings
    assert finding.startswith("2 of 2 pairs make a turn or more")


def test_rank_correlation_is_spearman_s():
    x, y = np.random.default_rng(0).normal(size=(2, 3, 5))
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x.ravel(), y.ravel()).statistic)
    assert np.isnan(rank_correlation(x[:1, :2], y[:1, :2]))
    tied = (3 * y).round()
    assert rank_correlation(x, tied) == pytest.approx(spearmanr(x.ravel(), tied.ravel()).statistic)
    assert np.isnan(rank_correlation(x, np.zeros_like(y)))


def test_one_token_is_refused(rope):
    assert PositionalBiasStudy.problems(Target("tiny", rope, IDS[:, :1]))
    assert not PositionalBiasStudy.problems(Target("tiny", rope, IDS))
