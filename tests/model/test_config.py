"""Shapes that are impossible are named before anything is built."""

from dataclasses import replace

import pytest

from trainer.model.config import ModelConfig

GOOD = ModelConfig(64, 96, 2, 8, 4, vocab_size=100)


def test_a_good_shape_has_no_problems():
    assert GOOD.problems() == []
    assert ModelConfig().problems() == []


def test_head_size_is_a_share_of_the_width_unless_set():
    assert GOOD.head_size == 8
    assert replace(GOOD, head_dim=32).head_size == 32


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"num_attention_heads": 24}, "model.num_attention_heads: 24 heads do not divide"),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads: 3 does not divide"),
        ({"num_key_value_heads": 16}, "model.num_key_value_heads: 16 does not divide"),
        ({"head_dim": 7}, "model.head_dim: 7 is odd"),
        ({"hidden_size": 24}, "model.head_dim: 3 is odd"),
    ],
)
def test_a_wrong_value_is_named(change, start):
    (problem,) = map(str, replace(GOOD, **change).problems())
    assert problem.startswith(start)


def test_all_problems_come_at_once():
    assert len(replace(GOOD, num_key_value_heads=3, head_dim=7).problems()) == 2


def test_heads_need_not_divide_the_width_if_head_dim_is_set():
    assert replace(GOOD, num_attention_heads=12, head_dim=16).problems() == []
