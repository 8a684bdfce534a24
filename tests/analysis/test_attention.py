"""The numbers of every row, against loops over single queries and keys in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis import attention as module
from trainer.analysis.attention import (
    MEASURES,
    attention_rows,
    head_attention,
    probe,
    stable_rank,
)
from trainer.analysis.capture import capture
from trainer.positional.encodings import alibi_slopes


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
    rows = attention_rows(heads, rotated=rotated)
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


PROBED = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))


def by_hand(heads, alibi):
    """The measures of one layer, query by query."""
    q, k = heads.rotated_q.double().numpy(), heads.rotated_k.double().numpy()
    B, Hq, T, D = q.shape
    group = Hq // k.shape[1]
    sink, entropy, distance, largest = [], [], [], -np.inf
    for b in range(B):
        for h in range(Hq):
            for i in range(1, T):
                first = max(0, i - (heads.encoding.window or T) + 1)
                keys = np.arange(first, i + 1)
                logits = k[b, h // group, keys] @ q[b, h, i] / np.sqrt(D)
                if heads.softcap is not None:
                    logits = heads.softcap * np.tanh(logits / heads.softcap)
                largest = max(largest, logits.max())
                if alibi:
                    logits = logits - alibi_slopes(Hq)[h] * (i - keys)
                p = np.exp(logits - logits.max())
                learned = 0.0
                if heads.sinks is not None:
                    learned = np.exp(float(heads.sinks[h]) - logits.max())
                sink.append(p[0] / (p.sum() + learned) if first == 0 else 0.0)
                p /= p.sum()
                entropy.append(-(p * np.log(p)).sum() / np.log(len(p)))
                distance.append((p * (i - keys)).sum())
    ranks = []
    for matrix in k.reshape(-1, T, D):
        values = np.linalg.svd(matrix, compute_uv=False)
        ranks.append((values**2).sum() / values[0] ** 2)
    return [np.mean(sink), np.mean(entropy), np.mean(distance), largest, np.mean(ranks)]


LAYOUTS = {
    "rope": {},
    "nope": {"layers": ["nope"]},
    "windows": {"windows": [5, None]},
    "alibi": {"layers": ["alibi"]},
    "alibi in a window": {"layers": ["alibi"], "windows": [7]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measures_are_the_plain_loop(tiny_decoder, layout):
    model = tiny_decoder(**LAYOUTS[layout])
    expected = []
    capture(model, PROBED, lambda heads: expected.append(by_hand(heads, "alibi" in layout)))
    measured = probe(model, PROBED)
    assert list(measured) == list(MEASURES)
    for name, values in zip(MEASURES, np.array(expected).T, strict=True):
        assert measured[name] == pytest.approx(list(values), rel=1e-4), name


def test_a_model_that_has_broken_is_looked_at_all_the_same(tiny_decoder):
    model = tiny_decoder()
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    measured = probe(model, PROBED)
    assert np.isfinite(measured["stable_rank"][0])
    assert np.isnan(measured["stable_rank"][1])


def test_stable_rank_counts_directions():
    keys = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0]))
    assert stable_rank(keys.mT @ keys).item() == pytest.approx((4 + 4 + 1) / 4)
