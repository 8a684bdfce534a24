"""Losses of short runs are those of tests/golden/losses.json.

A deliberate change of numerics makes the file anew: ``python scripts/make_golden.py losses``.

How closely: in float32 the kernels of other instruction sets (ATEN_CPU_CAPABILITY=default and
avx2, ONEDNN_MAX_CPU_ISA=AVX2, against AMX) moved losses and gradient norms by at most 3.2e-7 of
themselves. Where a part is computed in 16 bits (bf16, and Muon's orthogonalization), losses moved
by up to 7.4e-4 and gradient norms by up to 8.2e-3.
"""

import json

import pytest

from tests.golden.files import GOLDEN
from tests.training import golden_runs

EXPECTED = json.loads((GOLDEN / "losses.json").read_text())
RUNS = {**golden_runs.ALONE, **golden_runs.TOGETHER}
FLOAT32 = {"loss": 3e-6, "gradient_norm": 3e-6}
BFLOAT16 = {"loss": 3e-3, "gradient_norm": 3e-2}


def in_16_bits(name):
    return "bf16" in name or name == "muon"


@pytest.fixture(scope="module")
def present(tmp_path_factory):
    """Curves of this program now."""
    return golden_runs.curves(tmp_path_factory.mktemp("golden"))


def furthest(a, b, key):
    """The largest difference of two curves, relative to the second."""
    return max(abs(x / y - 1) for x, y in zip(a[key], b[key], strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_where_they_were(present, name):
    tolerance = BFLOAT16 if in_16_bits(name) else FLOAT32
    assert len(present[name]["loss"]) == golden_runs.STEPS
    for key in golden_runs.KEYS:
        moved = furthest(present[name], EXPECTED[name], key)
        assert moved < tolerance[key], f"{key} moved by {moved:.1e}"


@pytest.mark.parametrize("name", [name for name in RUNS if not in_16_bits(name)])
def test_every_strategy_and_backend_trains_alike_in_float32(present, name):
    for key in golden_runs.KEYS:
        assert furthest(present[name], present["sdpa"], key) < FLOAT32[key]


@pytest.mark.parametrize("name", [name for name in RUNS if in_16_bits(name)])
def test_16_bits_and_muon_train_otherwise(present, name):
    assert furthest(present[name], present["sdpa"], "loss") > 1e-4
