"""The needle that needs no tokenizer, and what heads make of it, against plain float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of
from trainer.analysis.capture import NeedlePrompt, capture
from trainer.analysis.matrix_entropy.measure import copied, needle_view, with_copy

IDS = torch.randint(50, (2, 80), generator=torch.Generator().manual_seed(4))


def test_the_end_of_the_text_is_copied_to_a_tenth_of_it():
    changed, copy = with_copy(IDS[:1])
    assert (copy.start, copy.stop) == (8, 18)
    assert changed[0, 8:18].tolist() == IDS[0, 70:].tolist()
    assert changed[0, :8].tolist() == IDS[0, :8].tolist()
    assert changed[0, 18:].tolist() == IDS[0, 18:].tolist()


def test_a_long_text_gets_no_longer_needle():
    _, copy = with_copy(torch.zeros(1, 5000, dtype=torch.long))
    assert (copy.start, copy.stop) == (500, 532)


def test_attention_and_directions_of_the_last_queries(tiny_decoder):
    model = tiny_decoder()
    view = needle_view(model, copied(IDS), [(1, 2)])
    layers = []
    capture(model, with_copy(IDS[:1])[0], layers.append)
    assert (view.needle, view.queries) == (slice(8, 19), 10)
    for heads in layers:
        for head in range(4):
            weights, _ = attention_of(heads, 0, head)
            mean = weights[-10:].mean(axis=0)
            np.testing.assert_allclose(view.attention[heads.layer, head], mean, atol=1e-5)
            on_needle = view.on_needle()[heads.layer, head]
            assert on_needle == pytest.approx(mean[8:19].sum(), abs=1e-5)

    queries = layers[1].rotated_q[0, 2].double().numpy()
    values, vectors = np.linalg.eigh(queries.T @ queries)
    vectors = vectors[:, np.argsort(-values)]
    cosines = queries[-10:] @ vectors / np.linalg.norm(queries[-10:], axis=1, keepdims=True)
    cosines *= np.sign((queries @ vectors).mean(axis=0))
    assert set(view.similarity) == set(view.maps) == {(1, 2)}
    np.testing.assert_allclose(view.similarity[1, 2], cosines, atol=1e-5)
    np.testing.assert_allclose((view.similarity[1, 2] ** 2).sum(axis=1), 1)
    np.testing.assert_allclose(view.maps[1, 2].sum(axis=1), 1, rtol=1e-5)


def test_a_question_is_read_as_it_is_also_behind_a_needle_at_the_beginning(tiny_decoder):
    """DoPE, Fig. 2: attention by key, of the last token and meaned over all queries."""
    model = tiny_decoder()
    prompt = NeedlePrompt(IDS, slice(1, 9), 6)
    view = needle_view(model, prompt, [(0, 3), (1, 0)])
    layers = []
    capture(model, IDS[:1], layers.append)
    assert set(view.average) == {(0, 3), (1, 0)}
    for heads in layers:
        for head in range(4):
            weights, _ = attention_of(heads, 0, head)
            of = view.attention[heads.layer, head]
            np.testing.assert_allclose(of, weights[-6:].mean(axis=0), atol=1e-5)
            np.testing.assert_allclose(view.last[heads.layer, head], weights[-1], atol=1e-5)
            assert view.on_needle()[heads.layer, head] == pytest.approx(of[1:9].sum(), abs=1e-6)
            if (heads.layer, head) in view.average:
                average = [sum(row[j] for row in weights) / 80 for j in range(80)]
                np.testing.assert_allclose(view.average[heads.layer, head], average, atol=1e-6)
