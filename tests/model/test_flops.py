"""Operations are those that torch counts, and visible pairs those that a plain loop finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import eager
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import forward_flops, training_flops, visible_pairs
from trainer.positional.config import PositionalConfig, build_layout

windows = st.none() | st.integers(1, 50)


def layout_for(config, windows=(None,)):
    return build_layout(
        PositionalConfig(windows=list(windows)),
        num_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        training_length=64,
    )


def loop(documents, window):
    """Pairs (query, key) of one document, the key not later and within the window."""
    number = [d for d, size in enumerate(documents) for _ in range(size)]
    return sum(
        number[i] == number[j] and j <= i and (window is None or i - j < window)
        for i in range(len(number))
        for j in range(len(number))
    )


def counted(function):
    """Return torch's counts: operations of the linear layers, and of attention."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(torch.ops.aten.bmm)
    return sum(counts.values()), attention


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), windows)
def test_pairs_are_those_of_a_double_loop(documents, window):
    assert sum(visible_pairs(n, window) for n in documents) == loop(documents, window)


SHAPES = {
    "grouped heads": {},
    "one key-value head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "wide heads with biases": {"head_dim": 20, "qkv_bias": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [None, [24], [10, 1, 13]])
def test_torch_counts_the_same(monkeypatch, shape, window, documents):
    """Eager attention computes every pair of a query and a key, hidden or not."""
    config = ModelConfig(32, 48, 2, 4, **{"num_key_value_heads": 2, "vocab_size": 50} | shape)
    model = Decoder(config, layout_for(config, [None, window]))
    for block in model.layers:
        block.self_attn.attend = eager
    ids = torch.zeros(1, 24, dtype=torch.long)
    mask = None
    if documents:
        mask = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None]
    seen = loop(documents or [24], None) + loop(documents or [24], window)
    computed = 2 * 24**2
    ours = (config, model.layout, 24, documents)

    products, attention = counted(lambda: model(ids, documents=mask))
    assert forward_flops(*ours) == products + attention * seen // computed
    products, attention = counted(lambda: model.loss(ids, ids, documents=mask).backward())
    assert training_flops(*ours) == products + attention * seen // computed
