"""The picture's plane, against scikit-learn's PCA."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from tests.analysis.attention_examples import layer_of_heads
from trainer.analysis.clusters.measure import snapshot


def test_the_plane_is_that_of_the_first_prefix_before_the_rotation():
    heads = layer_of_heads(T=64, texts=1)
    found = snapshot(heads, 1, [32, 64], points=10)
    assert [(p.length, p.rotated) for p in found.panels] == [
        (32, False),
        (32, True),
        (64, False),
        (64, True),
    ]
    keys, queries = heads.k[0, 1].numpy(), heads.q[0, 2:].numpy()
    pca = PCA(2).fit(np.concatenate([keys[:32], queries[0, :32], queries[1, :32]]))
    panel = found.panels[3]
    expected = pca.transform(heads.rotated_k[0, 1].numpy()[panel.positions])
    signs = np.sign((panel.keys * expected).sum(axis=0))
    np.testing.assert_allclose(panel.keys, expected * signs, atol=1e-4)
    expected = pca.transform(heads.rotated_q[0, 3].numpy()[panel.positions])
    np.testing.assert_allclose(panel.queries[1], expected * signs, atol=1e-4)
    np.testing.assert_allclose(found.origin, pca.transform(np.zeros((1, 8)))[0] * signs, atol=1e-4)
    values = np.linalg.svd(heads.rotated_k[0, 1].double().numpy(), compute_uv=False)
    assert panel.stable_rank == pytest.approx((values**2).sum() / values[0] ** 2)
    assert panel.queries.shape == (2, 10, 2)
