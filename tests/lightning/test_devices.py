"""Device of a run, and torch's settings for it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from trainer.common.ranks import Ranks, device_type
from trainer.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.lightning import setup
from trainer.lightning.setup import dense_peak, set_threads

SHARDED = RunConfig(strategy=StrategyConfig(name="fsdp2"))


def with_trainer(**values):
    return replace(SHARDED, trainer=TrainerConfig(**values))


@pytest.fixture
def gpu(monkeypatch):
    """A machine where torch sees a GPU, and nobody has set anything for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for name in [*os.environ]:
        if name.startswith(("PYTORCH_", "TORCH_", "CUBLAS_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("accelerator", "expected"), [("auto", "cuda"), ("cpu", "cpu")])
def test_auto_is_the_gpu_where_torch_sees_one(gpu, accelerator, expected):
    assert device_type(accelerator) == expected


@pytest.mark.parametrize(
    ("threads", "ranks", "expected"),
    [(None, Ranks(), 6), (2, Ranks(), 2), (None, Ranks(1, 2), 3), (2, Ranks(1, 2), 2)],
)
def test_a_run_has_the_usual_threads_and_ranks_their_share(monkeypatch, threads, ranks, expected):
    """torchrun's OMP_NUM_THREADS is not the user's choice."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setattr(setup, "share_of_cores", lambda _: 3)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    from torch._inductor import config as inductor

    before = torch.get_num_threads()
    with inductor.patch(compile_threads=9):
        set_threads(with_trainer(threads=threads, compile=True), ranks)
        assert inductor.compile_threads == (threads or 3)
    assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


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
