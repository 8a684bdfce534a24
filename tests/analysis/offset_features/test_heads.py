"""The part of one pair in a sink against loops over queries and keys, and a sink that one pair
makes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import layer_of_heads, turned
from trainer.analysis import attention
from trainer.analysis.offset_features.heads import sink_row
from trainer.positional.encodings import alibi_slopes


def looped(heads, head, pair, queries):
    """(weight, weight without the pair, margin, parts of it by pair), means over texts."""
    kv, slope = head // heads.queries_per_key, 0.0
    spectrum = heads.encoding.spectra[kv]
    if spectrum.alibi:
        slope = alibi_slopes(heads.q.shape[1])[head]
    pairs = len(spectrum.inv_freq)
    measured = []
    for q, k in zip(
        heads.rotated_q[:, head].double(), heads.rotated_k[:, kv].double(), strict=True
    ):
        for i in queries:
            by_pair = [
                [
                    float(q[i][[m, m + pairs]] @ k[j][[m, m + pairs]]) * heads.scale
                    for j in range(i + 1)
                ]
                for m in range(pairs)
            ]
            plain = [float(q[i] @ k[j]) * heads.scale for j in range(i + 1)]
            weights = []
            for scores in (plain, [s - p for s, p in zip(plain, by_pair[pair], strict=True)]):
                cap = heads.softcap
                capped = [cap * math.tanh(s / cap) for s in scores] if cap else scores
                exp = [math.exp(s - slope * (i - j)) for j, s in enumerate(capped)]
                learned = 0.0 if heads.sinks is None else math.exp(heads.sinks[head])
                weights.append(exp[0] / (sum(exp) + learned))
            margins = [scores_of[0] - sum(scores_of[1:]) / i for scores_of in (plain, *by_pair)]
            measured.append([*weights, *margins])
    weight, without, margin, *parts = np.mean(measured, axis=0)
    return weight, without, margin, parts


@pytest.mark.parametrize(
    ("name", "changes", "queries"),
    [
        pytest.param("rope", {}, range(10, 40), id="four queries a key-value pair"),
        pytest.param("half_rope", {"softcap": 2.0}, range(10, 40), id="half, soft-cap"),
        pytest.param("rope", {"scaling": 0.3}, range(10, 40), id="scaling"),
        pytest.param("rope", {"sinks": torch.arange(4.0)}, range(10, 40), id="learned sinks"),
        pytest.param("rope", {"training_length": 24}, range(6, 24), id="long text"),
    ],
)
def test_weights_and_margins_against_loops(name, changes, queries):
    heads = replace(layer_of_heads(name, kv_heads=1), **changes)
    measured = sink_row(heads, 3, 1, control=0)
    weight, without, margin, parts = looped(heads, 3, 1, queries)
    control = looped(heads, 3, 0, queries)[1]
    assert measured["attention_without_fast_pair"] == pytest.approx(control, rel=1e-4)
    assert (measured["attention"], measured["attention_without"]) == pytest.approx(
        (weight, without), rel=1e-4
    )
    assert measured["explained"] == pytest.approx(1 - without / weight, abs=1e-4)
    assert measured["margin"] == pytest.approx(margin, rel=1e-3, abs=1e-4)
    by_pair = [sink_row(heads, 3, pair)["margin_of_pair"] for pair in range(len(parts))]
    np.testing.assert_allclose(by_pair, parts, rtol=1e-3, atol=1e-4)
    assert measured["strongest_pair"] == np.argmax(parts)
    assert measured["margin_of_strongest"] == max(by_pair)


def test_a_window_keeps_queries_that_see_the_first_token():
    heads = layer_of_heads(window=12)
    measured = sink_row(heads, 2, 0)
    assert measured["attention"] == pytest.approx(looped(heads, 2, 0, range(3, 12))[0], rel=1e-4)
    assert sink_row(layer_of_heads(window=1), 2, 0) is None


def test_the_bias_of_a_head_stays():
    heads = layer_of_heads()
    spectrum = replace(heads.encoding.spectra[0], alibi=True)
    heads = replace(heads, encoding=heads.encoding.map(lambda _: spectrum))
    measured = sink_row(heads, 1, 2)
    assert measured["attention_without"] == pytest.approx(
        looped(heads, 1, 2, range(10, 40))[1], rel=1e-4
    )


def test_of_a_long_text_some_queries_are_read(monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 3)
    heads = layer_of_heads(T=41)
    measured = sink_row(heads, 0, 0)
    assert measured["attention"] == pytest.approx(looped(heads, 0, 0, (10, 25, 40))[0], rel=1e-4)


def test_a_sink_by_one_feature_is_explained_by_it():
    """All keys lie against the queries in pair 3, the first one lies with them (Sec. 4.2)."""
    heads = layer_of_heads()
    spectrum = heads.encoding.spectra[0]
    q, k = 0.1 * heads.q, 0.1 * heads.k
    q[..., 3] += 6
    k[..., 3] -= 6
    k[:, :, 0, 3] += 12
    made = replace(heads, q=q, k=k, rotated_q=turned(q, spectrum), rotated_k=turned(k, spectrum))
    measured = sink_row(made, 1, 3, control=0)
    assert measured["attention_without_fast_pair"] > 0.99
    assert measured["attention"] > 0.99
    assert measured["attention_without"] == pytest.approx(
        np.mean([1 / (i + 1) for i in range(10, 40)]), rel=0.2
    )
    assert measured["explained"] > 0.9
    assert measured["strongest_pair"] == 3
    first, mean = k[:, 0, 0, [3, 7]].norm(dim=-1).mean(), k[:, 0][..., [3, 7]].mean((0, 1)).norm()
    assert measured["first_key"] == pytest.approx(float(first / mean), rel=1e-4)
    assert measured["margin_of_pair"] == pytest.approx(measured["margin"], rel=0.05)
