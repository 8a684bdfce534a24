"""Operations are those that torch counts, and visible pairs those that a plain loop finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import eager
from trainer.model.backends import Mask
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import dense_peak, forward_flops, training_flops, visible_pairs
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
    mask = Mask()
    if documents:
        numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None]
        mask = Mask(documents=numbers)
    seen = loop(documents or [24], None) + loop(documents or [24], window)
    computed = 2 * 24**2
    ours = (config, model.layout, 24, documents)

    products, attention = counted(lambda: model(ids, mask=mask))
    assert forward_flops(*ours) == products + attention * seen // computed
    products, attention = counted(lambda: model.loss(ids, ids, mask=mask).backward())
    assert training_flops(*ours) == products + attention * seen // computed


# Name, multiprocessors or compute units, boost clock (GHz), and a unit's operations a clock in
# bf16 by its architecture's whitepaper: 2 for each multiply-add, without sparsity.
UNITS = [
    ("NVIDIA A100-SXM4-80GB", 108, 1.410, 2048),
    ("NVIDIA RTX A6000", 84, 1.800, 1024),
    ("NVIDIA GeForce RTX 4090", 128, 2.520, 512),
    ("NVIDIA L40S", 142, 2.520, 1024),
    ("NVIDIA H100 80GB HBM3", 132, 1.980, 4096),
    ("NVIDIA H100 PCIe", 114, 1.755, 4096),
    ("NVIDIA H100 NVL", 132, 1.785, 4096),
    ("NVIDIA B200", 148, 1.965, 8192),
    ("AMD Instinct MI300X", 304, 2.100, 2048),
]


@pytest.mark.parametrize(("name", "units", "clock", "rate"), UNITS)
def test_peaks_are_units_times_rate_times_clock(name, units, clock, rate):
    """Under tensor load some clocks are lower, by less than a fifth; sparsity would be twofold."""
    assert 0.8 < dense_peak(name, "bf16") / (units * clock * rate * 1e9) < 1.01


def test_a_device_is_known_by_its_whole_name():
    """Slices and siblings of known devices are others; TF32 is the data sheets' half of bf16."""
    assert dense_peak("A100-SXM4-40GB", "fp32") == pytest.approx(156e12)
    assert dense_peak("NVIDIA GH200 480GB", "bf16") == dense_peak("NVIDIA H200", "bf16")
    others = "cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA GeForce RTX 4090 D"
    assert {dense_peak(name, "bf16") for name in others} == {None}
