"""The golden files of transformers are made again by the transformers that is installed.

Where these tests fail after an update, transformers moved; where the tests that read the files fail
alone, this program did.
"""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.golden.files import GOLDEN

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Make files of one kind; returns their directory."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(kind):
        importlib.import_module(f"golden.{kind}").make(tmp_path)
        return tmp_path

    return run


def test_rotations_are_made_again(make):
    found = json.loads((make("rope") / "rope.json").read_text())
    expected = json.loads((GOLDEN / "rope.json").read_text())
    numbers = ("inv_freq", "attention_factor", "cos", "sin")
    for a, b in zip(found, expected, strict=True):
        assert {k: v for k, v in a.items() if k not in numbers} == {
            k: v for k, v in b.items() if k not in numbers
        }
        for key in numbers:
            # A last digit of a frequency is 2.4e-4 rad at position 4,095.
            atol = 5e-4 if key in ("cos", "sin") else 0
            torch.testing.assert_close(
                torch.tensor(a[key]), torch.tensor(b[key]), rtol=1e-6, atol=atol
            )


def test_models_are_made_again(make):
    models = make("families") / "models"
    assert len(list(models.iterdir())) == 6
    for path in models.iterdir():
        stored = GOLDEN / "models" / path.name
        weights, expected = (load_file(p / "model.safetensors") for p in (path, stored))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
        logits, wanted = (np.load(p / "logits.npz")["logits"] for p in (path, stored))
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)
