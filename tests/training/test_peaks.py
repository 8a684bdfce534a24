"""Peaks are dense, and of the device that bears the name."""

import pytest

from trainer.training.peaks import dense_peak

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


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("A100-SXM4-40GB", 312e12, 19.5e12),  # drivers before 2021 leave the vendor out
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362.05e12, 91.6e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA H200 NVL", 835.5e12, 60e12),
        ("NVIDIA GH200 480GB", 989.4e12, 66.9e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA RTX A6000", 154.8e12, 38.7e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("AMD Instinct MI300X VF", 1307.4e12, 163.4e12),
    ],
)
def test_a_name_within_another_is_another_device(name, bf16, fp32):
    assert dense_peak(name, "bf16") == pytest.approx(bf16)
    assert dense_peak(name, "fp32") == pytest.approx(fp32)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA A10G",
        "NVIDIA A16",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA L40",
        "NVIDIA T400 4GB",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300A",
        "AMD Instinct MI325X",
    ],
)
def test_a_device_that_is_not_known_has_no_peak(name):
    assert dense_peak(name, "bf16") is None
    assert dense_peak(name, "fp32") is None


@pytest.mark.parametrize(
    ("name", "fp32"),
    [
        ("Tesla V100-SXM2-32GB", 15.7e12),
        ("Tesla V100-PCIE-16GB", 14.0e12),
        ("Tesla V100S-PCIE-32GB", 16.4e12),
        ("Tesla T4", 8.1e12),
    ],
)
def test_devices_without_bf16_units_have_no_peak_in_it(name, fp32):
    assert dense_peak(name, "bf16") is None
    assert dense_peak(name, "fp32") == pytest.approx(fp32)
