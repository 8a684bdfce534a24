"""Batches fit the limit and, on a CPU, its caches."""

from __future__ import annotations

import pytest

from trainer.evaluation import passes
from trainer.evaluation.passes import sequences_at_once


@pytest.mark.parametrize(
    ("length", "batch_tokens", "expected"),
    [(8, 64, 8), (8, 71, 8), (8, 4, 1), (8, 10**9, 16), (1000, 10**9, 1)],
)
def test_no_more_than_allowed_and_than_the_cache_holds(
    tiny_decoder, monkeypatch, length, batch_tokens, expected
):
    model = tiny_decoder()
    monkeypatch.setattr(passes, "IN_CACHE", 128 * model.config.hidden_size)
    assert sequences_at_once(model, length, batch_tokens) == expected


def test_a_gpu_takes_all_that_is_allowed(tiny_decoder, monkeypatch):
    monkeypatch.setattr(passes, "IN_CACHE", 0)
    assert sequences_at_once(tiny_decoder().to("meta"), 8, 64) == 8
