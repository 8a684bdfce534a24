"""Numbers of a configuration that no computation goes on with, wherever they stand in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from trainer.common.errors import Problem
from trainer.model.config import LARGEST

MOST = {
    **dict.fromkeys(("threads", "workers", "num_workers", "gpus_per_node"), 1024),
    **LARGEST,
    # Beyond these, what is computed from them is no number any more.
    **dict.fromkeys(("lr", "muon_lr", "weight_decay", "peak", "z_loss", "initializer_range"), 1000),
    **dict.fromkeys(("eps", "rms_norm_eps"), 1),
    **dict.fromkeys(("softcap", "final_softcap"), 1_000_000),
    "max_new_tokens": 1 << 24,
    "at": 1 << 62,
    "trials": 1_000_000,
    "lengths": 1_000_000,
}
"""Largest values by the name of a key, where larger ones hang or fail late."""


def number_problems(value: Any, path: str = "") -> Iterator[Problem]:
    """A sentence for every number at any depth that is not finite or too large, and for every seed
    that is none; ``value`` is a dataclass, or what stands in one."""
    key = path.rpartition(".")[2].partition("[")[0]
    if isinstance(value, bool):
        return
    if isinstance(value, int) and (key == "seed" and not 0 <= value <= 1 << 62):
        yield Problem(path, f"expected a whole number from 0 to 2^62, got {value}.")
    elif isinstance(value, int | float):
        if not math.isfinite(value):
            yield Problem(path, f"expected a finite number, got {value}.")
        elif abs(value) > MOST.get(key, 1 << 62 if isinstance(value, int) else math.inf):
            yield Problem(path, f"expected at most {MOST.get(key, 1 << 62):,}, got {value}.")
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "controls":  # each is checked as the run that it makes
                where = f"{path}.{field.name}" if path else field.name
                yield from number_problems(getattr(value, field.name), where)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from number_problems(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from number_problems(item, f"{path}[{index}]")
