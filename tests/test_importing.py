"""What `import trainer`, `trainer.lightning` and `trainer.hf` load and change in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.program import ROOT

SCRIPT = """
import importlib, json, os, sys
import torch

def settings():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    functions = [
        cuda.cudnn_sdp_enabled,
        cuda.flash_sdp_enabled,
        cuda.mem_efficient_sdp_enabled,
        cuda.math_sdp_enabled,
        torch.get_float32_matmul_precision,
        torch.are_deterministic_algorithms_enabled,
        torch.get_default_dtype,
        torch.get_default_device,
        torch.get_num_threads,
        torch.get_num_interop_threads,
        torch.is_grad_enabled,
        torch.initial_seed,
    ]
    values = {function.__name__: str(function()) for function in functions}
    values["tf32"] = str((cuda.matmul.allow_tf32, cudnn.allow_tf32))
    values["cudnn"] = str((cudnn.enabled, cudnn.benchmark, cudnn.deterministic))
    values["drawn"] = str(torch.get_rng_state().sum().item())
    return values | dict(os.environ)

name, *theirs = sys.argv[1:]
for module in theirs:
    importlib.import_module(module)
modules, before = set(sys.modules), settings()
importlib.import_module(name)
after = settings()
changed = {key for key in before | after if before.get(key) != after.get(key)}
print(json.dumps([sorted(changed), sorted(set(sys.modules) - modules)]))
"""
OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}  # set by its compiler
HEAVY = {
    "accelerate",
    "datasets",
    "hydra",
    "lightning",
    "lm_eval",
    "matplotlib",
    "mlflow",
    "omegaconf",
}
HEAVY |= {"pandas", "pyarrow", "scipy", "sklearn", "tensorboard", "transformers", "trl", "wandb"}


@pytest.mark.parametrize(
    ("name", "theirs", "rooms"),
    [
        ("trainer", [], set()),
        pytest.param(
            "trainer.lightning",
            ["lightning"],
            {"common", "lightning", "model", "positional"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "trainer.hf",
            ["transformers.trainer", "peft"],
            {"common", "hf"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_importing_changes_no_setting_and_loads_little(name, theirs, rooms):
    """Beside what the libraries do that it is for."""
    present = [module for module in theirs if find_spec(module.split(".")[0])]
    clean = {
        key: x for key, x in os.environ.items() if key not in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    }
    command = [sys.executable, "-c", SCRIPT, name, *present]
    out = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    changed, modules = json.loads(out.stdout.splitlines()[-1])
    assert set(changed) <= OF_TORCH
    loaded = [module.split(".") for module in modules]
    assert {parts[1] for parts in loaded if parts[0] == "trainer" and len(parts) > 1} == rooms
    assert not {parts[0] for parts in loaded} & HEAVY
