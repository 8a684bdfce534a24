"""Positional bias, its gradients and prefix spreads, against Def. 3.1 and autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis.attention import attention_rows
from trainer.analysis.capture import capture
from trainer.analysis.positional_bias.measure import (
    bias_gradients,
    positional_biases,
    prefix_spreads,
)
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout

IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("window", [None, 6, 1])
def test_bias_is_that_of_definition_3_1(window):
    heads = layer_of_heads(window=window)
    measured = positional_biases(attention_rows(heads))
    for head in range(4):
        maps = [attention_of(heads, text, head)[0] for text in range(2)]
        for shift, values in ((0, measured["diagonal"]), (1, measured["previous"])):
            expected = np.mean([(weights(40, shift, window) * a).sum() / 40 for a in maps])
            assert values[:, head].mean().item() == pytest.approx(expected, abs=1e-5)


def dense_gradients(model, ids, shift):
    """The same norms from whole attention maps and autograd, ``[layers, heads]`` each."""
    T, group = ids.shape[1], 2
    c = torch.tensor(weights(T, shift))
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
    for block, (x, layer_pass, *_) in zip(model.layers, states, strict=True):
        attention = block.self_attn
        w_q, w_k = (
            p.weight.detach().double().requires_grad_()
            for p in (attention.q_proj, attention.k_proj)
        )
        q, k = ((x[0].double() @ w.T).unflatten(-1, (-1, 8)).transpose(0, 1) for w in (w_q, w_k))
        tables = layer_pass.queries.groups[0]
        if tables.cos is not None:
            cos, sin = tables.cos.double(), tables.sin.double()
            q, k = (
                torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
                for a, b in (v.chunk(2, dim=-1) for v in (q, k))
            )
        for head in range(len(q)):
            scores = q[head] @ k[head // group].T / 8**0.5
            future = torch.ones(T, T).triu(1).bool()
            weights_of = scores.masked_fill(future, -torch.inf).exp()
            bias = (c * weights_of / weights_of.sum(-1, keepdim=True)).sum() / T
            gradients = torch.autograd.grad(bias, (w_q, w_k), retain_graph=True)
            norms.append([g.norm().item() for g in gradients])
    return np.moveaxis(np.array(norms).reshape(len(model.layers), -1, 2), -1, 0)


@pytest.mark.parametrize("encoding", ["rope", "nope"])
@pytest.mark.parametrize("shift", [0, 1])
def test_gradients_are_those_of_autograd(tiny_decoder, encoding, shift):
    model = tiny_decoder(layers=[encoding])
    measured = bias_gradients(model, IDS, shift)
    expected = np.mean([dense_gradients(model, row[None], shift) for row in IDS], axis=0)
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-7)


def test_gradients_leave_the_model_as_it_was(tiny_decoder):
    model = tiny_decoder()
    before = model(IDS)
    bias_gradients(model, IDS, 0)
    assert all(block.self_attn.observe is None for block in model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model(IDS), before)


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


@pytest.mark.parametrize("by_depth", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_figure_4_the_gap_between_rope_and_nope_opens_at_the_second_layer(shift, by_depth):
    """At initialisation with one standard deviation for all matrices. Where those that write to the
    residual stream are divided by sqrt(2 layers), the first layers see little but the embeddings,
    and the gradients are alike in them."""
    ids = torch.randint(500, (1, 256), generator=torch.Generator().manual_seed(0))
    rope_model, nope_model = (initialised(name, 0, by_depth) for name in ("rope", "nope"))
    rope, nope = (bias_gradients(model, ids, shift) for model in (rope_model, nope_model))
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
    capture(model, IDS, lambda heads: None)
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


def test_a_small_spread_is_not_lost_beside_a_large_common_vector(tiny_decoder):
    """Embeddings of norm 6,000 that differ by 0.1, before the norm."""
    model = tiny_decoder()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(1000 + 0.01 * torch.randn(50, 32))
    states = model.layers[0].input_layernorm(model.embed_tokens(IDS[:1]))[0].detach().double()
    widest = max(
        (states[: i + 1].mean(0) - states[j]).norm().item() for i in range(24) for j in range(i + 1)
    )
    assert prefix_spreads(model, IDS[:1])[0] == pytest.approx(widest, rel=1e-4)
