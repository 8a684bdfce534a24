"""What is kept of a head is its own queries, the keys that it reads, and means of neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.attention_examples import layer_of_heads
from trainer.analysis.offset_features import measure as module
from trainer.analysis.offset_features.measure import head_view


def test_points_of_a_pair_are_the_channels_that_turn_together():
    heads = layer_of_heads("half_rope", D=8)
    query, key = head_view(heads, 3).points(1)
    np.testing.assert_array_equal(query, heads.q[0, 3][:, [1, 3]])
    np.testing.assert_array_equal(key, heads.k[0, 1][:, [1, 3]])


def test_a_long_text_is_sampled_and_its_maps_are_means(monkeypatch):
    monkeypatch.setattr(module, "POINTS", 8)
    monkeypatch.setattr(module, "CELLS", 7)
    heads = layer_of_heads(T=40, D=8)
    view = head_view(heads, 2)
    assert (view.step, view.cell) == (5, 6)
    np.testing.assert_array_equal(view.key, heads.k[0, 1][::5])
    assert view.query_map.shape == (8, 7)
    for cell in range(7):  # the last has four tokens
        mean = heads.q[0, 2][6 * cell : 6 * cell + 6, 3].mean().item()
        assert view.query_map[3, cell] == pytest.approx(mean, rel=1e-5)
