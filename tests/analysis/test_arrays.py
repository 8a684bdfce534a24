"""Means over texts, against numpy's mean of all at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.analysis.topic import bucket_means, position_edges, prefix_lengths, stacked


def test_means_over_texts_with_those_read_without_later_tokens():
    values = torch.randn(2, 5, 3, dtype=torch.float64)
    means = stacked(
        [{"x": layer} for layer in values], [{"x": -layer[..., :1]} for layer in values]
    )
    expected = values.numpy().mean(axis=1)
    expected[..., :1] *= -1
    np.testing.assert_allclose(means["x"], expected)


def test_prefixes_double_and_end_with_the_text():
    assert prefix_lengths(200) == [32, 64, 128, 200]
    assert prefix_lengths(128) == [32, 64, 128]
    assert prefix_lengths(20) == [20]


@given(st.integers(1, 200_000))
def test_buckets_cover_every_position_once_and_few_suffice(length):
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert edges[: min(length, 16) + 1] == list(range(min(length, 16) + 1))
    assert len(edges) <= 17 + 16 * np.log2(max(length / 16, 1)) + 1


@given(st.integers(1, 300))
def test_means_of_buckets(length):
    values = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    edges = position_edges(length)
    means = bucket_means(values, edges)
    for index, (a, b) in enumerate(pairwise(edges)):
        np.testing.assert_allclose(means[:, index], values[:, a:b].double().mean(dim=1), atol=1e-9)
