"""Comparison of two runs: all rows of their metrics, all tensors of their last checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from trainer.runs.checkpoints import step_name
from trainer.runs.config import RunConfig
from trainer.runs.metrics_file import TIMES, read_metrics
from trainer.runs.state import load, read_metadata

ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative tolerance of losses when the number of ranks changes."""


def compare(whole: RunConfig, broken: RunConfig, exactly: bool) -> str:
    """Describe the first difference between two finished runs; return "" if there is none."""
    rows = [_rows(Path(config.run_dir)) for config in (whole, broken)]
    steps = [[row["step"] for row in part] for part in rows]
    if steps[0] != steps[1]:
        return f"rows of steps {steps[1]} instead of {steps[0]}"
    tolerance = 0.0 if exactly else ROUNDING[whole.trainer.precision]
    for expected, found in zip(*rows, strict=True):
        for key in expected if exactly else ("loss", "learning_rate", "tokens", "phase"):
            a, b = expected[key], found.get(key, math.nan)
            if a != b and not abs(a - b) <= tolerance * abs(a):
                return f"{key} at step {expected['step']}: {b} instead of {a}"
    return _first_different_tensor(whole, broken) if exactly else ""


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run_dir / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def _first_different_tensor(whole: RunConfig, broken: RunConfig) -> str:
    last = step_name(whole.trainer.max_steps)
    a, b = (_tensors(Path(c.run_dir) / "checkpoints" / last) for c in (whole, broken))
    if a.keys() != b.keys():
        return f"the last checkpoint holds other tensors: {sorted(a.keys() ^ b.keys())[:3]}"
    different = (name for name, value in a.items() if not torch.equal(value, b[name]))
    return next((f"{name} differs in the last checkpoint" for name in different), "")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in read_metadata(path).items()
    }
    load(tensors, path)
    return tensors
