"""Write the losses of short runs of this program with each strategy, backend and precision."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def make(out: Path) -> None:
    """Write ``losses.json``; print how far each curve moved from the stored one."""
    sys.path.insert(0, str(ROOT))
    from tests.training.golden_runs import curves

    torch.set_num_threads(1)
    path = out / "losses.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as directory:
        losses = curves(Path(directory))
    for run, rows in losses.items():
        for key, values in rows.items():
            old = before.get(run, {}).get(key, [])
            if len(old) == len(values):
                moved = max(abs(a / b - 1) for a, b in zip(values, old, strict=True))
                print(f"{run}: {key} moved by at most {moved:.1e} (relative)")
    lines = (f"{json.dumps(run)}: {json.dumps(rows)}" for run, rows in losses.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
