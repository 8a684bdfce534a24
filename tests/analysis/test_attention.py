"""The numbers of every row, against loops over single queries and keys in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis import attention as module
from trainer.analysis.attention import attention_rows, head_attention
from trainer.analysis.clusters import stable_rank


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


def test_stable_rank_counts_directions():
    keys = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0]))
    assert stable_rank(keys.mT @ keys).item() == pytest.approx((4 + 4 + 1) / 4)
