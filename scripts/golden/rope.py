"""Write frequencies, attention factors, cosines and sines of transformers' rotary embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

POSITIONS = (1, 255, 1023, 4095)


def _long(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * m for m in range(pairs)],
        "long_factor": [1.0 + 0.5 * m for m in range(pairs)],
        "original_max_position_embeddings": 1024,
    }


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (64, 4096, {"rope_type": "default"}),
    (128, 8192, {"rope_type": "default", "rope_theta": 500_000.0}),
    (80, 2048, {"rope_type": "default", "rope_theta": 1_000.0}),
    (64, 4096, {"rope_type": "linear", "factor": 4.0}),
    (128, 4096, {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e5}),
    (64, 1024, {"rope_type": "dynamic", "factor": 2.0}),
    (128, 2048, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e5}),
    (64, 4096, YARN | {"original_max_position_embeddings": 1024}),
    (64, 4096, YARN | {"original_max_position_embeddings": 1024, "truncate": False}),
    (128, 32768, YARN | {"rope_theta": 1e6, "truncate": True, "beta_fast": 16, "beta_slow": 2}),
    (128, 32768, YARN | {"rope_theta": 1e6, "truncate": False, "attention_factor": 1.3}),
    (64, 4096, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    (64, 4096, _long(32)),
    (96, 4096, _long(48) | {"attention_factor": 1.19}),
    (64, 4096, LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 1024}),
    (128, 131072, LLAMA3 | {"factor": 32.0, "rope_theta": 5e5}
     | {"original_max_position_embeddings": 8192}),
    (64, 4096, {"rope_type": "proportional"}),
    (64, 4096, {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}),
    (128, 4096, {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}),
]  # fmt: skip
"""Cases: head size, ``max_position_embeddings``, ``rope_parameters``."""


def make(out: Path) -> None:
    """Write ``rope.json``: each case at sequences of 1,024 and 4,096 tokens."""
    cases = []
    for head_dim, training_length, values in CASES:
        parameters = {"rope_theta": 1e4} | values
        for length in (1024, 4096):
            config = LlamaConfig(
                hidden_size=4 * head_dim,
                num_attention_heads=4,
                head_dim=head_dim,
                max_position_embeddings=training_length,
                rope_parameters=dict(parameters),
            )
            rotary = LlamaRotaryEmbedding(config)
            positions = torch.arange(length)[None]
            cos, sin = rotary(torch.zeros(1, 1), positions)
            rows = [position for position in POSITIONS if position < length]
            pairs = len(rotary.inv_freq)
            cases.append(
                {"head_dim": head_dim, "training_length": training_length, "rope": parameters}
                | {"length": length, "positions": rows}
                | {"inv_freq": _rounded(rotary.inv_freq)}
                | {"attention_factor": float(rotary.attention_scaling)}
                | {"cos": [_rounded(cos[0, p, :pairs]) for p in rows]}
                | {"sin": [_rounded(sin[0, p, :pairs]) for p in rows]}
            )
    (out / "rope.json").write_text(_text(cases))


def _rounded(row: torch.Tensor) -> list[float]:
    """Return values rounded to nine significant digits, which represent a float32 exactly."""
    return [float(f"{value:.9g}") for value in row.tolist()]


def _text(cases: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n"
