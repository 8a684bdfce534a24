"""Sinks, against loops over single queries and keys."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis.attention import attention_rows
from trainer.analysis.sinks.measure import Sinks, attention_map


def result_of(*layers):
    sinks = Sinks()
    for heads in layers:
        sinks.update(heads, attention_rows(heads, rotated=False), attention_rows(heads))
    return sinks.result()


@pytest.mark.parametrize("state", ["plain", "rotated"])
def test_curves_by_position(state):
    heads = layer_of_heads(texts=1)
    result = result_of(heads)
    found = getattr(result, state)
    attention, dots = attention_of(heads, 0, 3, rotated=state == "rotated")
    dots = np.where(np.isinf(dots), np.nan, dots)
    expected = {
        "key_dot": np.nanmean(dots, axis=0),
        "peak": np.nanmax(dots, axis=1),
        "sink_weight": attention[:, 0],
    }
    for name, values in expected.items():
        by_bucket = [values[a:b].mean() for a, b in pairwise(result.edges)]
        np.testing.assert_allclose(
            getattr(found, name)[0, 3], by_bucket, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_the_first_key_stands_alone_in_the_norms():
    heads = layer_of_heads()
    heads.k[:, :, 0] *= 0.01
    result = result_of(heads, layer_of_heads(index=1))
    assert result.layers == [0, 1]
    assert result.key_norm.shape == (2, 2, len(result.edges) - 1)
    assert (result.key_norm[0, :, 0] < 0.05 * result.key_norm[0, :, 1:].min()).all()
    np.testing.assert_allclose(
        result.key_norm[1, 0, 0],
        np.linalg.norm(layer_of_heads(index=1).k[:, 0, 0].numpy(), axis=-1).mean(),
        rtol=1e-6,
    )


@pytest.mark.parametrize(("T", "size", "cell"), [(40, 512, 1), (40, 20, 2), (601, 100, 7)])
def test_a_map_sums_keys_and_means_queries(T, size, cell):
    heads = layer_of_heads(T=T)
    found = attention_map(heads, 3, size=size)
    whole, _ = attention_of(heads, 0, 3)
    cells = -(-T // cell)
    assert found.shape == (cells, cells)
    assert cells <= size
    for a, b in ((0, 0), (cells - 1, 0), (cells - 1, cells - 1), (cells // 2, cells // 3)):
        part = whole[a * cell : (a + 1) * cell, b * cell : (b + 1) * cell]
        assert found[a, b] == pytest.approx(part.sum(axis=1).mean(), rel=1e-4, abs=1e-7)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
