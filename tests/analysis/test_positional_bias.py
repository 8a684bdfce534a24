"""Positional bias, its gradients and prefix spreads, against Def. 3.1 and autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import (
    attention_of,
    captured,
    cells,
    drawn,
    layer_of_heads,
)
from trainer.analysis import positional_bias
from trainer.analysis.attention import NeedlePrompt, attention_blocks, attention_statistics
from trainer.analysis.positional_bias import (
    analyze_positional_bias,
    attention_by_distance,
    bias_gradients,
    fresh_decoders,
    head_biases,
    highest_rotating,
    positional_biases,
    prefix_spreads,
    scaling_factors,
    yarn_attention,
)
from trainer.analysis.target import Target
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import by_name
from trainer.positional.layout import Intervention
from trainer.positional.rescaling import yarn_turns

IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))
LONG = torch.randint(50, (2, 48), generator=torch.Generator().manual_seed(0))


def weights(tokens, shift, window=None):
    """c_ij of Def. 3.1: 1 on the key ``shift`` tokens back, and rows that sum to zero."""
    c = np.zeros((tokens, tokens))
    for i in range(tokens):
        seen = range(max(0, i + 1 - (window or tokens)), i + 1)
        if i - shift in seen and len(seen) > 1:
            c[i, seen] = -1 / (len(seen) - 1)
            c[i, i - shift] = 1
    assert np.allclose(c.sum(axis=1), 0)
    return c


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 2.0])])
@pytest.mark.parametrize("window", [None, 6, 1])
def test_bias_is_that_of_definition_3_1(window, sinks):
    heads = replace(layer_of_heads(window=window), sinks=sinks)
    measured = positional_biases(attention_statistics(heads))
    for head in range(4):
        maps = [attention_of(heads, text, head)[0] for text in range(2)]
        for shift, values in ((0, measured["diagonal"]), (1, measured["previous"])):
            expected = np.mean([(weights(40, shift, window) * a).sum() / 40 for a in maps])
            assert values[:, head].mean().item() == pytest.approx(expected, abs=1e-5)


def dense_gradients(model, ids, shift, window=None):
    """The same norms from whole attention maps and autograd, ``[layers, heads]`` each."""
    T, group = ids.shape[1], 2
    c = torch.tensor(weights(T, shift, window))
    states = []
    hooks = [
        block.self_attn.register_forward_pre_hook(lambda _, args: states.append(args))
        for block in model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    norms = []
    for block, (x, *_), encoding in zip(model.layers, states, model.layout.layers, strict=True):
        attention = block.self_attn
        w_q, w_k = (
            p.weight.detach().double().requires_grad_()
            for p in (attention.q_proj, attention.k_proj)
        )
        q, k = ((x[0].double() @ w.T).unflatten(-1, (-1, 8)).transpose(0, 1) for w in (w_q, w_k))
        if inv_freq := encoding.spectra[0].inv_freq:
            turns = torch.outer(torch.arange(T), torch.tensor(inv_freq)).double()
            cos, sin = turns.cos(), turns.sin()
            q, k = (
                torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
                for a, b in (v.chunk(2, dim=-1) for v in (q, k))
            )
        for head in range(len(q)):
            scores = q[head] @ k[head // group].T / 8**0.5
            seen = torch.ones(T, T).tril().triu(1 - (window or T)).bool()
            weights_of = scores.masked_fill(~seen, -torch.inf).exp()
            bias = (c * weights_of / weights_of.sum(-1, keepdim=True)).sum() / T
            gradients = torch.autograd.grad(bias, (w_q, w_k), retain_graph=True)
            norms.append([g.norm().item() for g in gradients])
    return np.moveaxis(np.array(norms).reshape(len(model.layers), -1, 2), -1, 0)


@pytest.mark.parametrize(("encoding", "window"), [("rope", None), ("nope", None), ("rope", 5)])
@pytest.mark.parametrize("shift", [0, 1])
def test_gradients_are_those_of_autograd(tiny_decoder, encoding, window, shift):
    model = tiny_decoder(layers=[encoding], windows=[window])
    measured = bias_gradients(model, IDS)[shift]
    expected = np.mean([dense_gradients(model, row[None], shift, window) for row in IDS], axis=0)
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-7)


def initialised(encoding, seed, by_depth=True):
    """Eight layers as they are before training."""
    config = ModelConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        initializer_by_depth=by_depth,
    )
    layout = build_layout(
        PositionalConfig(layers=[encoding]),
        num_layers=8,
        num_key_value_heads=2,
        head_dim=32,
        training_length=256,
    )
    return Decoder(config, layout, seed)


@pytest.mark.slow
@pytest.mark.parametrize("by_depth", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_figure_4_the_gap_between_rope_and_nope_opens_at_the_second_layer(shift, by_depth):
    """At initialisation with one standard deviation for all matrices. Where those that write to the
    residual stream are divided by sqrt(2 layers), the first layers see little but the embeddings,
    and the gradients are alike in them."""
    ids = torch.randint(500, (1, 256), generator=torch.Generator().manual_seed(0))
    rope_model, nope_model = (initialised(name, 0, by_depth) for name in ("rope", "nope"))
    rope, nope = (bias_gradients(model, ids)[shift] for model in (rope_model, nope_model))
    assert not any(block._forward_pre_hooks for block in rope_model.layers)
    for ours, theirs in zip(rope, nope, strict=True):
        ratio = ours.mean(axis=1) / theirs.mean(axis=1)
        assert ratio[0] == pytest.approx(1, abs=0.05)
        if by_depth:
            assert ratio[:3] == pytest.approx(1, abs=0.05)
            assert ratio[-2:].min() > 1.1
        else:
            assert ratio[1] > 1.05
            assert ratio[2:].min() > 1.3


def test_spreads_are_the_widest_of_all_prefixes_of_what_enters_attention(tiny_decoder):
    model = tiny_decoder()
    states = []

    def normalised(norm, args):
        x = args[0].detach().double()
        x = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        states.append(x * norm.weight.detach())

    norms = [*(block.input_layernorm for block in model.layers), model.norm]
    hooks = [norm.register_forward_pre_hook(normalised) for norm in norms]
    captured(model, IDS)
    for hook in hooks:
        hook.remove()
    measured = prefix_spreads(model, IDS)
    expected = []
    for layer in states:
        widest = [
            max(
                (text[: i + 1].mean(0) - text[j]).norm().item()
                for i in range(len(text))
                for j in range(i + 1)
            )
            for text in layer
        ]
        expected.append(np.mean(widest))
    np.testing.assert_allclose(measured, expected, rtol=1e-5)


def test_figure_6_all_methods_compress_the_low_frequencies():
    """Fast pairs stay but for PI's, slow ones are divided by s."""
    factors = scaling_factors(by_name("rope", 64, 2048), 2048, 2.0)
    np.testing.assert_allclose(factors["pi"], 0.5)
    np.testing.assert_allclose(factors["ntk"], 2 ** (-np.arange(32) / 31))  # Eq. 3, m from 0
    assert factors["yarn"][0] == 1
    for gamma in (factors[name] for name in ("pi", "ntk", "yarn")):
        assert gamma[-1] == pytest.approx(0.5)
        assert (np.diff(gamma) <= 1e-12).all()


@pytest.mark.parametrize("s", [2.0, 3.0, 4.0])
def test_figures_6_and_11_have_yarns_ramp_over_the_frequency(s):
    """Eq. 11, p = 1 and q = 32 turns."""
    spectrum = by_name("rope", 64, 2048)
    expected = []
    for omega in spectrum.inv_freq:
        turns = 2048 * omega / (2 * np.pi)
        kappa = min(max((turns - 1) / 31, 0.0), 1.0)
        expected.append((1 - kappa) / s + kappa)
    np.testing.assert_allclose(scaling_factors(spectrum, 2048, s)["yarn"], expected)


def test_pairs_that_do_not_rotate_have_the_factor_1():
    spectrum = replace(by_name("rope", 8, 64), inv_freq=(1.0, 0.1, 0.001, 0.0))
    for gamma in scaling_factors(spectrum, 64, 2.0).values():
        assert gamma[3] == 1
        assert gamma[2] < 1


def test_the_highest_rotating_head_reads_a_key_head_that_rotates(tiny_decoder):
    """Query heads 2 and 3 read the key head without rotation."""
    layout = tiny_decoder(heads={"nope": 0.5}).layout
    values = np.array([[0.1, 0.2, 0.9, 0.8], [0.3, 0.4, 0.7, 0.95]])
    assert highest_rotating(values, layout) == (1, 1)


@pytest.fixture
def rope(tiny_decoder):
    return tiny_decoder(training_length=32)


def test_a_temperature_of_long_texts_does_not_change_the_bias_within(rope):
    """RoPE-ID and DroPE sharpen attention in texts longer than the training length."""
    bias = head_biases(Target("tiny", rope, LONG[:, :32]))
    rope.layout = rope.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=2.0))
    measured = head_biases(Target("tiny", rope, LONG))
    for kind, expected in bias.items():
        np.testing.assert_allclose(measured[kind], expected, atol=1e-6)


def test_fresh_decoders_have_the_model_s_shape_and_normal_weights(rope):
    """Against autograd in a decoder that is built here, and a loop over prefixes."""
    tokens, fresh = fresh_decoders(rope, LONG)
    assert tokens == 32
    words, text = torch.unique(LONG[:1, :32], return_inverse=True)
    for version, kind in (("encoded", "rope"), ("nope", "nope")):
        layout = rope.layout.map(lambda _, kind=kind: by_name(kind, 8, 32))
        config = replace(rope.config, vocab_size=len(words), initializer="normal")
        config = replace(config, initializer_by_depth=False)
        for seed in range(3):
            decoder = Decoder(config, layout, seed)
            for shift, name in enumerate(["gradient_diagonal", "gradient_previous"]):
                query, key = dense_gradients(decoder, text, shift)
                norms = np.hypot(query, key).mean(axis=1)
                np.testing.assert_allclose(fresh[version][name][seed], norms, rtol=1e-3)
            x = decoder.embed_tokens(text)[0].detach().double()
            assert x.std() == pytest.approx(0.02, rel=0.1)
            x = x / (x.square().mean(-1, keepdim=True) + rope.config.rms_norm_eps).sqrt()
            widest = max(
                (x[: i + 1].mean(0) - x[j]).norm().item() for i in range(32) for j in range(i + 1)
            )
            assert fresh[version]["prefix_spread"][seed, 0] == pytest.approx(widest, rel=1e-5)


def gradients(model):
    """Norms towards the diagonal, ``[seeds, layers]`` by version."""
    _, fresh = fresh_decoders(model, LONG)
    return {version: measures["gradient_diagonal"] for version, measures in fresh.items()}


def test_a_model_without_encoding_is_compared_with_rope(tiny_decoder):
    rope, nope = (gradients(tiny_decoder(layers=[name])) for name in ("rope", "nope"))
    for version in ("encoded", "nope"):
        np.testing.assert_allclose(rope[version], nope[version])


def test_a_bias_by_distance_stays_and_factors_on_pairs_do_not(tiny_decoder, monkeypatch):
    monkeypatch.setattr(positional_bias, "SEEDS", 1)
    biased = gradients(tiny_decoder(layers=["alibi"]))
    plain = tiny_decoder()
    expected = gradients(plain)
    assert not np.allclose(biased["encoded"], expected["encoded"])
    np.testing.assert_allclose(biased["nope"], expected["nope"])
    layout = plain.layout
    gains = Intervention(key=((2.0,) * 8, (1.0,) * 8))
    plain.layout = replace(layout, layers=(layout.layers[0].with_intervention(gains),) * 2)
    np.testing.assert_allclose(gradients(plain)["encoded"], expected["encoded"])


@pytest.mark.parametrize(("when", "differ"), [("after_drop", False), ("always", True)])
def test_norms_are_on_as_they_are_when_a_run_begins(tiny_decoder, when, differ):
    """Those that come on at the drop are off: the numbers are those of a model without norms."""
    plain = tiny_decoder(layers=["nope"])
    config = replace(plain.config, qk_norm=QKNormConfig(when))
    layers = tuple(replace(layer, qk_norm=True) for layer in plain.layout.layers)
    normed = Decoder(config, replace(plain.layout, layers=layers))
    measured, expected = gradients(normed), gradients(plain)
    for version, values in expected.items():
        assert (not np.allclose(measured[version], values)) is differ


def test_attention_under_yarn(rope):
    """Fig. 7 and 8: plain attention under both layouts, by distance, and of a prompt's last
    query."""
    prompt = NeedlePrompt(LONG[:, :32], slice(5, 9))
    by_distance, of_last = yarn_attention(rope, prompt.ids, (1, 2), prompt)
    for name, layout in (("trained", rope.layout), ("yarn", rope.layout.rescaled(yarn_turns, 2.0))):
        with rope.using(layout):
            layers = captured(rope, prompt.ids)
        maps = np.array(
            [[[attention_of(h, row, j)[0] for row in range(2)] for j in range(4)] for h in layers]
        ).mean(axis=2)
        np.testing.assert_allclose(of_last[name], maps[:, :, -1], rtol=1e-3)
        expected = [maps[1, 2].diagonal(-back).mean() for back in range(32)]
        np.testing.assert_allclose(by_distance[name], expected, rtol=1e-3)
    assert not np.allclose(of_last["trained"], of_last["yarn"])


@pytest.mark.parametrize("window", [None, 9])
def test_attention_by_distance_is_the_mean_over_queries_that_have_such_a_key(window, monkeypatch):
    blocks = partial(attention_blocks, size=16)
    monkeypatch.setattr(positional_bias, "attention_blocks", blocks)
    heads = layer_of_heads(window=window)
    maps = np.mean([attention_of(heads, text, 2)[0] for text in range(2)], axis=0)
    expected = [maps.diagonal(-back).mean() for back in range(40)]
    np.testing.assert_allclose(attention_by_distance(heads, 2), expected, rtol=1e-4, atol=1e-7)


def test_yarn_goes_beyond_what_published_weights_reach(rope):
    prompt = NeedlePrompt(LONG[:, :32], slice(5, 9))
    reaching = replace(rope.layout, reach=4 * rope.layout.training_length)
    with rope.using(reaching):
        _, of_last = yarn_attention(rope, prompt.ids, (1, 2), prompt)
    assert not np.allclose(of_last["trained"], of_last["yarn"])


def test_figures_and_rows_of_heads_under_yarn(rope, monkeypatch):
    """The head that is shown near the needle attends to it most as trained, the other one is most
    positional."""
    monkeypatch.setattr(positional_bias, "fresh_decoders", lambda *_: (0, {}))
    prompt = NeedlePrompt(LONG[:, :32], slice(5, 9))
    results = analyze_positional_bias(Target("tiny", rope, LONG, prompt=prompt))
    rows = results.rows
    biases = [cells(rows, name, 2, 4, length=32) for name in ("diagonal", "previous")]
    positional = np.unravel_index(np.maximum(*biases).argmax(), (2, 4))
    layers = captured(rope, prompt.ids)
    maps = np.zeros((2, 4, 32))
    for heads, head, text in product(layers, range(4), range(2)):
        maps[heads.layer, head] += attention_of(heads, text, head)[0][-1] / 2
    seeking = np.unravel_index(maps[..., 5:9].sum(axis=-1).argmax(), (2, 4))
    for metric, place in (
        ("attention_by_distance", positional),
        ("attention_near_needle", seeking),
    ):
        chosen = rows[(rows.metric == metric) & (rows.variant == "trained")]
        assert {*zip(chosen.layer, chosen["head"], strict=True)} == {tuple(place)}
    assert chosen.length.tolist() == [*range(-5, 12)]  # from the needle's first token
    np.testing.assert_allclose(chosen.value, maps[tuple(seeking)][:17], rtol=1e-3)
    _, near = drawn(results, "attention_under_yarn")
    assert [*near.lines[0].x] == [*range(-5, 12)]
    for panel, s in zip(drawn(results, "rescaling_factors"), (2, 3, 4), strict=True):
        inv_freq = np.array(rope.layout.layers[0].spectra[0].inv_freq)
        first_slow = np.flatnonzero(inv_freq * 32 < 2 * np.pi)[0]
        assert panel.vertical[0] == first_slow - 0.5
        pi = cells(rows, "frequency_factor", variant=f"PI, s = {s}")
        np.testing.assert_allclose(pi, 1 / s)


def test_gradients_have_a_row_a_seed_and_the_range_of_all_seeds(rope, monkeypatch):
    metrics = "gradient_diagonal", "gradient_previous", "prefix_spread"
    of_seeds = np.array([[1.0, 2.0], [4.0, 3.0], [7.0, 7.0]])
    fresh = {}
    for n, version in enumerate(("encoded", "nope")):
        fresh[version] = {name: of_seeds + 10 * m + 100 * n for m, name in enumerate(metrics)}
    monkeypatch.setattr(positional_bias, "fresh_decoders", lambda *_: (32, fresh))
    results = analyze_positional_bias(Target("tiny", rope, LONG))
    panels = drawn(results, "positional_bias_gradients")
    for m, metric in enumerate(metrics):
        for n, version in enumerate(("with positions", "NoPE")):
            for seed in range(3):
                row = cells(results.rows, metric, variant=f"fresh, {version}, seed {seed}")
                np.testing.assert_array_equal(row, of_seeds[seed] + 10 * m + 100 * n)
            if m < 2:
                line = panels[m].lines[n]
                lines = np.array([line.low, line.y, line.high]) - 10 * m - 100 * n
                np.testing.assert_allclose(lines, [[1, 2], [4, 4], [7, 7]])


def test_a_shape_that_is_too_large_is_not_built(rope, monkeypatch):
    monkeypatch.setattr(positional_bias, "BUDGET", 1e6)
    assert fresh_decoders(rope, LONG) == (0, {})
