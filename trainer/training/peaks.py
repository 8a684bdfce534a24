"""Peak throughput of devices: dense peaks from vendors' data sheets, in operations per second.

Many of NVIDIA's data sheets print tensor-core peaks for 2:4 sparse matrices and say so in a
footnote; the dense peaks, which count in training, are half of these.
"""

from __future__ import annotations

import re
from typing import Literal

# The whole name without the vendor: (bf16 on tensor or matrix cores, fp32 outside of them, as
# torch computes it unless TF32 is turned on), in TFLOP/s; None where the device has no bf16 units.
_PEAKS: dict[str, tuple[float | None, float]] = {
    # V100 and V100S data sheet (2020)
    r"V100-SXM2-(16|32)GB": (None, 15.7),
    r"V100-PCIE-(16|32)GB": (None, 14.0),
    r"V100S-PCIE-32GB": (None, 16.4),
    # T4 data sheet (2019)
    r"T4": (None, 8.1),
    # A100 data sheet (2021), all form factors
    r"A100-(SXM4-[48]0GB|PCIE-40GB)|A100 80GB PCIe": (312.0, 19.5),
    # A10 data sheet (2021)
    r"A10": (125.0, 31.2),
    # GA102 architecture whitepaper, appendix on the RTX A6000
    r"RTX A6000": (154.8, 38.7),
    # Ada architecture whitepaper, appendix; with float32 accumulation, half of the float16 rate
    r"GeForce RTX 4090": (165.2, 82.6),
    # L4 data sheet (2023): 242 sparse
    r"L4": (121.0, 30.3),
    # L40S data sheet (2023)
    r"L40S": (362.05, 91.6),
    # H100 architecture whitepaper (SXM5: 1978.9 sparse, PCIe: 1513)
    r"H100 80GB HBM3": (989.4, 66.9),
    r"H100 PCIe": (756.0, 51.2),
    # H100 data sheet, column NVL: 1671 sparse
    r"H100 NVL": (835.5, 60.0),
    # H200 data sheet (SXM: 1979 sparse, the H100's cores; NVL: 1671)
    r"H200": (989.4, 66.9),
    r"H200 NVL": (835.5, 60.0),
    # GH200 data sheet: 1979 sparse, the H100's cores
    r"GH200 (120GB|480GB|144G HBM3e)": (989.4, 66.9),
    # Blackwell data sheet, a GPU: HGX B200 4500 sparse, GB200 NVL72 5000
    r"B200": (2250.0, 75.0),
    r"GB200": (2500.0, 80.0),
    # MI300X data sheet (2023), fp32 of the vector units
    r"MI300X( VF)?": (1307.4, 163.4),
}


def dense_peak(device_name: str, precision: Literal["bf16", "fp32"]) -> float | None:
    """Return the dense peak in operations per second, or None if it is unknown.

    Args:
        device_name: name from ``torch.cuda.get_device_name()``. It must match as a whole: a slice
            of a device, or a sibling with a longer name, is another device.
        precision: value of ``trainer.precision``; ``fp32`` is true float32, not TF32.
    """
    name = re.sub(r"^(NVIDIA |Tesla |AMD Instinct )+", "", device_name)
    for pattern, (bf16, fp32) in _PEAKS.items():
        if re.fullmatch(pattern, name):
            peak = bf16 if precision == "bf16" else fp32
            return None if peak is None else peak * 1e12
    return None
