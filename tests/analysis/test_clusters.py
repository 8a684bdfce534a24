"""Cluster geometry, against loops over pairs, numpy's SVD and scikit-learn on the raw vectors."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import davies_bouldin_score, silhouette_score

from tests.analysis.attention_examples import captured, cells, drawn, layer_of_heads
from trainer.analysis import clusters as module
from trainer.analysis.attention import Heads
from trainer.analysis.clusters import (
    analyze_clusters,
    cloud,
    cluster_measures,
    prefix_lengths,
    principal_axes,
    project,
    sample_positions,
)
from trainer.analysis.target import Target, stacked
from trainer.config import AnalysisConfig


def result_of(heads, **options):
    return stacked([cluster_measures(heads, [32, 40], **options)])


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("state", ["plain", "rotated"])
def test_means_over_pairs(state, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)
    heads = layer_of_heads(texts=1)
    result = result_of(heads)
    q, k = (heads.q, heads.k) if state == "plain" else (heads.rotated_q, heads.rotated_k)
    q, k = q[0].double().numpy(), k[0].double().numpy()
    for i, n in enumerate([32, 40]):
        for name, measure in (("cosine", cosine), ("dot", np.dot)):
            for side, head, vectors in (("query", 3, q[3, :n]), ("key", 1, k[1, :n])):
                expected = np.mean([measure(a, b) for a, b in permutations(vectors, 2)])
                value = result[f"{state}.{side}_{name}"][0, head, i]
                assert value == pytest.approx(expected, rel=1e-9)
            for head in range(4):  # heads 0 and 1 read key head 0
                pairs = product(q[head, :n], k[head // 2, :n])
                across = np.mean([measure(a, b) for a, b in pairs])
                value = result[f"{state}.cross_{name}"][0, head, i]
                assert value == pytest.approx(across, abs=1e-9)


def test_singular_values_are_those_of_the_svd():
    heads = layer_of_heads(texts=1)
    result = result_of(heads)
    before, after = (
        np.linalg.svd(x[0, 1, :32].double().numpy(), compute_uv=False)
        for x in (heads.k, heads.rotated_k)
    )
    for name, values in (("plain", before), ("rotated", after)):
        expected = (values**2).sum() / values[0] ** 2
        assert result[f"{name}.key_stable_rank"][0, 1, 0] == pytest.approx(expected, rel=1e-9)
    assert result["key_fsv_ratio"][0, 1, 0] == pytest.approx(after[0] / before[0], rel=1e-6)
    whole = np.linalg.svd(heads.q[0, 2].double().numpy(), compute_uv=False)
    assert result["query_first_share"][0, 2, -1] == pytest.approx(whole[0] ** 2 / (whole**2).sum())


def test_a_temperature_does_not_change_the_ratio_of_first_singular_values():
    plain = layer_of_heads()
    warm = Heads(0, plain.encoding, plain.q, plain.k, plain.rotated_q * 1.7, plain.rotated_k, 64)
    name = "query_fsv_ratio"
    np.testing.assert_allclose(result_of(plain)[name], result_of(warm)[name])


@pytest.mark.parametrize(("points", "head"), [(20, 3), (100, 1), (100, 2)])
def test_separation_is_that_of_scikit_learn(points, head):
    heads = layer_of_heads(texts=1)
    result = result_of(heads, points=points)
    for i, n in enumerate([32, 40]):
        chosen = sample_positions(n, points)
        assert len(chosen) == min(points, n)
        queries, keys = heads.rotated_q[0, head][chosen], heads.rotated_k[0, head // 2][chosen]
        vectors = np.concatenate([queries, keys])
        labels = [0] * len(chosen) + [1] * len(chosen)
        expected = silhouette_score(vectors, labels), davies_bouldin_score(vectors, labels)
        assert result["rotated.silhouette"][0, head, i] == pytest.approx(expected[0], abs=1e-5)
        score = result["rotated.davies_bouldin"][0, head, i]
        assert score == pytest.approx(expected[1], rel=1e-5)


def test_clouds_far_from_the_origin_are_apart_as_near_it():
    """Sink dimensions of published models are hundreds of times as large as all others."""
    near = layer_of_heads(texts=1)
    far = replace(near, q=near.q + 300, k=near.k + 300)
    vectors = np.concatenate([x.double().numpy() for x in (far.q[0, 3], far.k[0, 1])])
    expected = silhouette_score(vectors, [0] * 40 + [1] * 40)
    measured = result_of(far)["plain.silhouette"][0, 3, -1]
    assert measured == pytest.approx(expected, rel=1e-9)


def test_the_plane_is_that_of_keys_and_queries_together():
    heads = layer_of_heads(T=64, texts=1)
    vectors = cloud(heads, 1)
    axes = principal_axes(vectors["plain"])
    points, rank = project(vectors["rotated"], axes, points=10)
    keys, queries = heads.k[0, 1].numpy(), heads.q[0, 2:].numpy()
    chosen = sample_positions(64, 10)
    pca = PCA(2).fit(np.concatenate([keys, *queries]))
    origin = pca.transform(np.zeros((1, 8)))
    expected = pca.transform(heads.rotated_k[0, 1].numpy()[chosen]) - origin
    signs = np.sign((points[0] * expected).sum(axis=0))
    np.testing.assert_allclose(points[0], expected * signs, atol=1e-4)
    expected = pca.transform(heads.rotated_q[0, 3].numpy()[chosen]) - origin
    np.testing.assert_allclose(points[2], expected * signs, atol=1e-4)
    values = np.linalg.svd(heads.rotated_k[0, 1].double().numpy(), compute_uv=False)
    assert rank == pytest.approx((values**2).sum() / values[0] ** 2)
    assert points.shape == (3, 10, 2)


def test_the_key_heads_that_chosen_heads_read_are_shown(tiny_decoder, monkeypatch):
    """Of four query heads, the first two read the first of two key heads."""
    seen = []
    monkeypatch.setattr(module, "snapshots_plot", lambda target, shown, looks: seen.append(shown))
    ids = torch.randint(0, 50, (1, 8), generator=torch.Generator().manual_seed(0))
    for chosen in ([(1, 1)], [(0, 2), (0, 3), (1, 0)]):
        target = Target("tiny", tiny_decoder().eval(), ids, AnalysisConfig(chosen=chosen))
        analyze_clusters(target)
    assert seen == [[(1, 0)], [(0, 1), (1, 0)]]


@pytest.mark.parametrize("index", range(4))
def test_axes_have_the_sign_that_makes_their_largest_part_positive(index):
    axes = principal_axes(cloud(layer_of_heads(texts=1, index=index), 1)["plain"])
    np.testing.assert_array_equal(axes.max(axis=0), np.abs(axes).max(axis=0))


IDS = torch.randint(0, 50, (2, 80), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def found(tiny_decoder):
    """Model and results of two texts of 80 tokens, C = 32."""
    model = tiny_decoder(training_length=32).eval()
    return model, analyze_clusters(Target("tiny", model, IDS))


def test_curves_are_means_over_heads_of_what_their_panel_names(found):
    _, results = found

    def mean(metric, variant):
        rows = cells(results.rows, metric, variant=variant).reshape(-1, 3)
        return pytest.approx(rows.mean(axis=0))

    sides = {"keys with keys": "key", "queries with queries": "query", "queries with keys": "cross"}
    for kind in ("cosine", "dot"):
        panels = {panel.title: panel for panel in drawn(results, f"clusters_{kind}")}
        for title, side in sides.items():
            before, after = panels[title].lines
            assert before.x == after.x == [32, 64, 80]
            assert before.y == mean(f"{side}_{kind}", "plain")
            assert after.y == mean(f"{side}_{kind}", "rotated")
    panels = {panel.title: panel for panel in drawn(results, "clusters_singular_values")}
    for title, side, heads in (("keys", "key", 2), ("queries", "query", 4)):
        assert panels[title].lines[1].y == mean(f"{side}_stable_rank", "rotated")
        changes = panels[f"{title}: first singular value"]
        assert changes.lines[0].y == mean(f"{side}_fsv_ratio", "rotated / plain")
        each = cells(results.rows, f"{side}_fsv_ratio").reshape(2 * heads, 3)
        np.testing.assert_array_equal(changes.faint, each)
    _, index = drawn(results, "clusters_separation")
    of_heads = cells(results.rows, "davies_bouldin", variant="plain").reshape(-1, 3)
    assert index.lines[0].y == pytest.approx(np.median(of_heads, axis=0))


def test_heads_are_counted_by_the_share_of_their_first_component(found):
    _, results = found
    (panel,) = drawn(results, "clusters_first_component")
    for side, points in panel.points.items():
        name = {"queries": "query", "keys": "key"}[side]
        shares = 100 * cells(results.rows, f"{name}_first_share")
        near = [100 * np.mean(np.abs(shares - middle) < 2.5) for middle in points[:, 0]]
        np.testing.assert_allclose(points[:, 1], near)
        assert points[:, 1].sum() == pytest.approx(100)


def test_snapshots_are_of_a_text_of_the_training_length_and_of_the_whole_one(found):
    model, results = found
    panels = drawn(results, "clusters_snapshots")
    assert len(panels) == 2 * 4
    for layer in range(2):
        of_layer = iter(panels[4 * layer :])
        for n, state in product((32, 80), ("before", "after")):
            heads = captured(model, IDS[:1, :n])[layer]
            keys = (heads.k if state == "before" else heads.rotated_k)[0, 0].double().numpy()
            values = np.linalg.svd(keys, compute_uv=False)
            panel = next(of_layer)
            rank = (values**2).sum() / values[0] ** 2
            assert panel.title == f"{state} rotation\n{n} tokens, rank {rank:.2f}"
            assert panel.y == f"L{layer}, key head 0"
            assert [*panel.points] == ["keys", "queries 0", "queries 1"]
            assert {points.shape for points in panel.points.values()} == {(n, 2)}


def test_prefixes_double_and_end_with_the_text():
    assert prefix_lengths(200) == [32, 64, 128, 200]
    assert prefix_lengths(128) == [32, 64, 128]
    assert prefix_lengths(20) == [20]
