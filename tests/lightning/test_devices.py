"""Device of a run, and torch's settings for it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from trainer.common.ranks import Ranks
from trainer.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.lightning import devices
from trainer.lightning.devices import (
    dense_peak,
    device_type,
    set_threads,
)

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
    assert device_type(with_trainer(accelerator=accelerator)) == expected


@pytest.mark.parametrize(
    ("threads", "ranks", "expected"),
    [(None, Ranks(), 6), (2, Ranks(), 2), (None, Ranks(1, 2), 3), (2, Ranks(1, 2), 2)],
)
def test_a_run_has_the_usual_threads_and_ranks_their_share(monkeypatch, threads, ranks, expected):
    """torchrun's OMP_NUM_THREADS is not the user's choice."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setattr(devices, "share_of_cores", lambda _: 3)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    from torch._inductor import config as inductor

    before = torch.get_num_threads()
    with inductor.patch(compile_threads=9):
        set_threads(with_trainer(threads=threads, compile=True), ranks)
        assert inductor.compile_threads == (threads or 3)
    assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


# Name, multiprocessors or compute units, boost clock (GHz), and a unit's operations a clock in
# bf16 and fp32 by its architecture's whitepaper: 2 for each multiply-add, without sparsity.
UNITS = [
    ("NVIDIA A100-SXM4-80GB", 108, 1.410, 2048, 128),
    ("NVIDIA A10", 72, 1.695, 1024, 256),
    ("NVIDIA RTX A6000", 84, 1.800, 1024, 256),
    ("NVIDIA GeForce RTX 4090", 128, 2.520, 512, 256),
    ("NVIDIA L4", 60, 2.040, 1024, 256),
    ("NVIDIA L40S", 142, 2.520, 1024, 256),
    ("NVIDIA H100 80GB HBM3", 132, 1.980, 4096, 256),
    ("NVIDIA H100 PCIe", 114, 1.755, 4096, 256),
    ("NVIDIA H100 NVL", 132, 1.785, 4096, 256),
    ("NVIDIA B200", 148, 1.965, 8192, 256),
    ("AMD Instinct MI300X", 304, 2.100, 2048, 256),
]


@pytest.mark.parametrize(("name", "units", "clock", "bf16", "fp32"), UNITS)
def test_peaks_are_units_times_rate_times_clock(name, units, clock, bf16, fp32):
    """Under tensor load some clocks are lower, by less than a fifth; sparsity would be twofold."""
    assert dense_peak(name, "fp32") == pytest.approx(units * clock * fp32 * 1e9, rel=0.04)
    assert 0.8 < dense_peak(name, "bf16") / (units * clock * bf16 * 1e9) < 1.01


UNKNOWN = [
    *("cpu", "", "NVIDIA A10G", "NVIDIA A16", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    *("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H100", "NVIDIA L40", "NVIDIA T400 4GB"),
    *("NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce RTX 4090 D"),
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300A", "AMD Instinct MI325X"),
]
"""Slices and siblings of devices with known peaks."""


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 19.5),
        ("A100-SXM4-40GB", 312, 19.5),  # drivers before 2021 leave the vendor out
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H200 NVL", 835.5, 60),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA GB200", 2500, 80),
        ("AMD Instinct MI300X VF", 1307.4, 163.4),
        ("Tesla V100-SXM2-32GB", None, 15.7),  # no bf16 units
        ("Tesla V100-PCIE-16GB", None, 14.0),
        ("Tesla V100S-PCIE-32GB", None, 16.4),
        ("Tesla T4", None, 8.1),
        *((name, None, None) for name in UNKNOWN),
    ],
)
def test_a_device_is_known_by_its_whole_name(name, bf16, fp32):
    for precision, tera in (("bf16", bf16), ("fp32", fp32)):
        expected = None if tera is None else pytest.approx(tera * 1e12)
        assert dense_peak(name, precision) == expected


@pytest.mark.parametrize(
    ("name", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 156),
        ("NVIDIA A10", 62.5),
        ("NVIDIA L40S", 183),
        ("NVIDIA H100 80GB HBM3", 494.7),
        ("NVIDIA H100 PCIe", 378),
        ("AMD Instinct MI300X", 653.7),
        ("Tesla T4", 8.1),  # no TF32: float32 as it is
        ("NVIDIA A16", None),
    ],
)
def test_tf32_peaks_are_those_of_data_sheets(name, tf32):
    assert dense_peak(name, "tf32") == (tf32 and pytest.approx(tf32 * 1e12, rel=0.02))
