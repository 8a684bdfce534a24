"""Devices of a run: settings of torch and OpenMP for them, and their peak throughput."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from trainer.common.errors import UserError
from trainer.common.processes import usual_threads
from trainer.common.ranks import Ranks, share_of_cores
from trainer.config import RunConfig
from trainer.runs.ranks import device_type

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
"""Variable that torch reads, by its present and its older names."""


def check_device(config: RunConfig) -> None:
    """Check that this machine can run the configuration.

    Raises:
        UserError: it has no GPU, or one that cannot compute in the configured precision.
    """
    run, device = config.trainer, device_type(config)
    if device == "cpu" and run.accelerator == "gpu":
        raise UserError("trainer.accelerator: expected a GPU, and torch sees none")
    if device == "cuda" and run.precision == "bf16" and not torch.cuda.is_bf16_supported(False):
        raise UserError(f"trainer.precision: {torch.cuda.get_device_name()} has no bf16; use fp32")


def precision_of(config: RunConfig) -> Literal["fp32", "bf16"]:
    """Return ``trainer.precision`` as it is on this machine."""
    if (precision := config.trainer.precision) != "auto":
        return precision
    is_gpu = device_type(config) == "cuda"
    return "bf16" if is_gpu and torch.cuda.is_bf16_supported(False) else "fp32"


def compiles(config: RunConfig) -> bool:
    """Whether a run compiles its model on this machine."""
    compile = config.trainer.compile
    return device_type(config) == "cuda" if compile == "auto" else compile


def set_threads(config: RunConfig, ranks: Ranks) -> None:
    """Set the number of CPU threads to ``trainer.threads`` or the default.

    With several ranks, and when compiling, the default is one per core of this process's share of
    the machine. All ranks call this together.
    """
    threads, share = config.trainer.threads, share_of_cores(ranks)
    # torchrun sets OMP_NUM_THREADS=1 on all ranks unless it is set.
    torch.set_num_threads(threads or (share if ranks.world_size > 1 else usual_threads()))
    if compiles(config) and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config as inductor  # after the environment is set

        # The default is one worker per core of the node, up to 32, on every rank.
        inductor.compile_threads = min(threads or share, 32)


def set_environment(config: RunConfig) -> None:
    """Set the environment that torch and cuBLAS read when first used; the user's settings stay."""
    if device_type(config) == "cpu":
        return
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def numerics(config: RunConfig) -> Iterator[None]:
    """Multiply float32 in TF32 and apply ``trainer.deterministic`` within the block."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # attributes are created at run time
    filled = memory.fill_uninitialized_memory
    try:
        # torch recommends torch.backends.cuda.matmul.fp32_precision. Lightning reads the older
        # setting, and torch raises if both are used.
        if device_type(config) == "cuda":
            torch.set_float32_matmul_precision("high")
        if config.trainer.deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling new memory first costs an eighth of a step; nothing reads it unwritten.
            memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if config.trainer.deterministic:
            torch.use_deterministic_algorithms(deterministic)
            memory.fill_uninitialized_memory = filled


# Dense peaks in bf16 (TFLOP/s), from vendors' data sheets. Many of NVIDIA's print peaks for 2:4
# sparse matrices and say so in a footnote; the dense peaks, which count in training, are half of
# these. The key is the whole name without the vendor. TF32 runs at half of bf16: the same data
# sheets have 156 for the A100, 495 for the H100 SXM, 653.7 for the MI300X.
PEAKS = {
    r"A100-(SXM4-[48]0GB|PCIE-40GB)|A100 80GB PCIe": 312.0,  # 2021, all form factors
    r"RTX A6000": 154.8,  # GA102 architecture whitepaper, appendix
    r"GeForce RTX 4090": 165.2,  # Ada whitepaper, with float32 accumulation
    r"L40S": 362.05,  # 2023
    r"H100 80GB HBM3|H200": 989.4,  # SXM5: 1978.9 sparse
    r"GH200 (120GB|480GB|144G HBM3e)": 989.4,  # 1979 sparse
    r"H100 PCIe": 756.0,  # 1513 sparse
    r"H[12]00 NVL": 835.5,  # 1671 sparse
    r"B200": 2250.0,  # a GPU of an HGX B200: 4500 sparse
    r"GB200": 2500.0,  # a GPU of a GB200 NVL72: 5000 sparse
    r"MI300X( VF)?": 1307.4,  # 2023
}


def dense_peak(device_name: str, precision: Literal["fp32", "bf16"]) -> float | None:
    """Return the dense peak in operations per second, or None if it is unknown.

    ``device_name`` from torch must match as a whole: a slice of a device, or a sibling with a
    longer name, is another device. Products of float32 run in TF32.
    """
    name = re.sub(r"^(NVIDIA |AMD Instinct )+", "", device_name)
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, name):
            return peak * 1e12 / (2 if precision == "fp32" else 1)
    return None
