"""Queries and keys in the scores, and attention against loops over pairs in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, captured, layer_of_heads
from tests.reference import turned
from trainer.analysis import attention as module
from trainer.analysis.attention import (
    attention_blocks,
    attention_statistics,
    cell_means,
    head_attention,
    head_vectors,
    pair_counts,
    stack_layers,
)
from trainer.analysis.clusters import stable_rank
from trainer.model.config import QKNormConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import Intervention, LayerEncoding


def expected_rows(attention, dots):
    T = len(attention)
    back = np.arange(T)[:, None] - np.arange(T)
    shared = attention / attention.sum(axis=1, keepdims=True)
    logs = np.log(np.where(shared > 0, shared, 1))
    return {
        "peak": dots.max(axis=1),
        "sink": attention[:, 0],
        "diagonal": attention.diagonal(),
        "previous": np.append(0, attention.diagonal(-1)),
        "distance": (shared * back).sum(axis=1),
        "entropy": -(shared * logs).sum(axis=1),
        "learned": 1 - attention.sum(axis=1),
    }


SOFTMAXES = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 9.0, 3.0])},
    "sinks and soft-cap": {"sinks": torch.tensor([0.5, -1.0, 9.0, 3.0]), "softcap": 1.5},
}
softmaxes = pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES)


@softmaxes
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    ("encoding", "window"), [("rope", None), ("rope", 7), ("rope", 1), ("alibi", None), ("nope", 5)]
)
def test_rows_are_those_of_plain_attention(encoding, window, rotated, softmax, monkeypatch):
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", 1)  # the smallest blocks, 16 queries
    heads = replace(layer_of_heads(encoding, window=window), **softmax)
    rows = attention_statistics(heads, rotated=rotated)
    for text, head in ((0, 0), (1, 3)):
        expected = expected_rows(*attention_of(heads, text, head, rotated=rotated))
        for name, values in expected.items():
            measured = getattr(rows, name)[text, head].numpy()
            np.testing.assert_allclose(measured, values, rtol=2e-4, atol=2e-5, err_msg=name)
    assert rows.visible.tolist() == [min(i + 1, window or 40) for i in range(40)]


@softmaxes
@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_attention_of_some_queries_of_one_head(encoding, softmax):
    heads = replace(layer_of_heads(encoding, window=9), **softmax)
    measured = head_attention(heads, 2, slice(10, 23))
    for text in range(2):
        expected, _ = attention_of(heads, text, 2)
        np.testing.assert_allclose(measured[text], expected[10:23, :23], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", range(4))
def test_a_pair_that_is_left_out_has_the_channels_that_its_own_head_rotates_together(head):
    """Heads of a layer may rotate different numbers of channels."""
    half, whole = by_name("half_rope", 8, 40), by_name("rope", 8, 40)
    heads = replace(layer_of_heads(), encoding=LayerEncoding((half, whole)))
    pairs = len((half, whole)[head // 2].inv_freq)
    for pair in range(pairs):
        others = [channel for channel in range(8) if channel not in (pair, pair + pairs)]
        expected, _ = attention_of(heads, 0, head, channels=others)
        measured = head_attention(heads, head, slice(0, 40), without=pair)
        np.testing.assert_allclose(measured[0], expected, rtol=1e-4, atol=1e-6)


def test_blocks_are_the_rows_of_attention_in_their_order():
    heads = layer_of_heads(window=20)
    expected, _ = attention_of(heads, 1, 3)
    starts = []
    for start, rows in attention_blocks(heads, 3, size=16):
        starts.append(start)
        stop = min(start + 16, 40)
        np.testing.assert_allclose(rows[1], expected[start:stop, :stop], rtol=1e-4, atol=1e-6)
    assert starts == [0, 16, 32]


@pytest.mark.parametrize("head", range(4))
def test_vectors_of_a_head_are_of_the_first_text_before_the_encoding(head):
    """Query heads 0 and 1 read key head 0, 2 and 3 read key head 1."""
    heads = layer_of_heads()
    vectors = head_vectors(heads, head)
    assert torch.equal(vectors["query"], heads.q[0, head])
    assert torch.equal(vectors["key"], heads.k[0, head // 2])


def test_query_heads_have_the_pairs_of_the_key_head_that_they_read():
    spectra = tuple(by_name(name, 8, 40) for name in ("half_rope", "rope", "nope"))
    assert pair_counts(LayerEncoding(spectra), 3, 8) == (2, 4, 4)
    assert pair_counts(LayerEncoding(spectra), 6, 8) == (2, 2, 4, 4, 4, 4)


def test_a_layer_with_fewer_pairs_has_no_numbers_for_the_others():
    layers = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]])
    expected = [[[1, 2], [3, 4]], [[5, np.nan], [6, np.nan]]]
    np.testing.assert_array_equal(stack_layers(layers), expected)


def test_the_last_cell_is_the_mean_of_fewer_neighbours():
    assert cell_means(torch.tensor([[1.0, 2, 3, 4, 6]]), 2).tolist() == [[1.5, 3.5, 6]]


def test_stable_rank_is_nan_where_a_vector_is_not_finite():
    grams = torch.stack([torch.diag(torch.tensor([4.0, 2.0])), torch.tensor([[1, np.inf], [0, 1]])])
    first, second = stable_rank(grams).tolist()
    assert first == 1.5
    assert np.isnan(second)


def test_stable_rank_counts_directions():
    keys = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0]))
    assert stable_rank(keys.mT @ keys).item() == pytest.approx((4 + 4 + 1) / 4)


IDS = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(4))
MODELS = {
    "rope": {},
    "half of the channels": {"encodings": {"rope": {"rotary_fraction": 0.5}}},
    "half of the heads": {"heads": {"nope": 0.5}},
    "nope": {"layers": ["nope"]},
    "qk_norm": {"model": {"qk_norm": QKNormConfig("always", "per_head")}},
}


@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_what_is_rotated_is_the_rotation_of_what_is_not(tiny_decoder, positional):
    """Against complex numbers in float64."""
    model = tiny_decoder(**positional)
    for heads in captured(model, IDS):
        assert heads.q.shape == (2, 4, 20, 8)
        assert heads.k.shape == (2, 2, 20, 8)
        assert heads.queries_per_key == 2
        for x, rotated, per_key in ((heads.q, heads.rotated_q, 2), (heads.k, heads.rotated_k, 1)):
            for h in range(x.shape[1]):
                inv_freq = heads.encoding.spectra[h // per_key].inv_freq
                expected = [turned(v, i, inv_freq) for i, v in enumerate(x[1, h].tolist())]
                torch.testing.assert_close(
                    rotated[1, h], torch.tensor(expected), rtol=1e-5, atol=1e-5
                )


@torch.no_grad()
def test_before_the_encoding_they_are_the_projections(tiny_decoder):
    model = tiny_decoder()
    block = model.layers[0]
    first, _ = captured(model, IDS)
    x = block.input_layernorm(model.embed_tokens(IDS))
    for seen, linear in ((first.q, block.self_attn.q_proj), (first.k, block.self_attn.k_proj)):
        assert torch.equal(seen, linear(x).unflatten(-1, (-1, 8)).transpose(1, 2))


def test_temperature_and_gains_are_included(tiny_decoder):
    model = tiny_decoder()
    plain, _ = captured(model, IDS)
    layout = model.layout.map(lambda s: s.with_temperature(scale=3.0))
    gains = Intervention(key=((2.0,) * 8, (1.0,) * 8))
    model.layout = replace(
        layout, layers=tuple(replace(layer, intervention=gains) for layer in layout.layers)
    )
    changed, _ = captured(model, IDS)
    assert changed.encoding.intervention == gains
    torch.testing.assert_close(changed.rotated_q, 3 * plain.rotated_q)
    torch.testing.assert_close(changed.rotated_k[:, 0], 2 * plain.rotated_k[:, 0])
    assert torch.equal(changed.rotated_k[:, 1], plain.rotated_k[:, 1])
    assert torch.equal(changed.q, plain.q)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_blocks_are_seen_too(tiny_decoder):
    """And nothing is compiled anew, then or after. The graphs run as they are, which is enough to
    see when they are made."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    plain = captured(tiny_decoder(), IDS)
    model = tiny_decoder()
    for block in model.layers:
        block.compile(backend=backend)
    before, made = model(IDS), len(graphs)
    assert made
    layers = captured(model, IDS)
    assert [heads.layer for heads in layers] == [0, 1]
    for heads, expected in zip(layers, plain, strict=True):
        torch.testing.assert_close(heads.rotated_q, expected.rotated_q)
    assert torch.equal(model(IDS), before)
    assert len(graphs) == made
