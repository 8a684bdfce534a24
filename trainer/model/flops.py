"""Floating-point operations of a model by its shape (PaLM, App. B, but causal), peaks of GPUs.

Counts matrix products, with two operations per multiply-add, and neither norms, rotations, softmax,
biases, embedding look-ups nor recomputation. Attention counts visible pairs of a query and a key;
torchtitan, nanochat and OLMo count the full square of the length.
"""

import re
from collections.abc import Sequence
from typing import Literal

from trainer.model.config import ModelConfig
from trainer.positional.layout import Layout


def visible_pairs(length: int, window: int | None = None) -> int:
    """Return the number of visible pairs: query t of ``length`` sees min(t + 1, window)."""
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Return the operations of one forward pass over one sequence, with logits at every position.

    ``layout``: its windows limit what a query sees, per layer. ``documents``: lengths in tokens of
    the documents that attention stays within (None: one document).
    """
    assert config.vocab_size is not None
    documents = [length] if documents is None else documents
    q_size = config.num_attention_heads * config.head_size
    kv_size = config.num_key_value_heads * config.head_size
    block = 2 * (q_size + kv_size) + 3 * config.intermediate_size
    weights = config.hidden_size * (config.num_hidden_layers * block + config.vocab_size)
    pairs = sum(visible_pairs(n, layer.window) for layer in layout.layers for n in documents)
    # Each pair costs one product of query and key, and one of probability and value.
    return 2 * weights * length + 4 * q_size * pairs


def training_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Return the operations of forward and backward over one sequence; see :func:`forward_flops`.

    Backward has two products for each one of forward: for its left and its right factor.
    """
    return 3 * forward_flops(config, layout, length, documents)


# Dense peaks in bf16 (TFLOP/s), from vendors' data sheets; those of 2:4 sparse matrices are twice
# these. The key is the whole name without the vendor. TF32 runs at half of bf16.
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
            share = 0.5 if precision == "fp32" else 1.0
            return share * peak * 1e12
    return None
