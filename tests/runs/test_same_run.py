"""Two runs are held against each other row by row and tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.runs.checkpoints import step_name
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.metrics_file import write_metrics
from trainer.runs.same_run import compare
from trainer.runs.state import save

FIRST = {"step": 1, "tokens": 64, "phase": 0, "loss": 2.0, "learning_rate": 0.1, "mfu": 0.5}
ROWS = [FIRST, FIRST | {"step": 2, "tokens": 128, "loss": 1.0, "gradient_norm": 4.0}]
TENSORS = {"model.a": torch.arange(3.0), "optimizer.a.step": torch.tensor(2)}


@pytest.fixture
def made(tmp_path):
    """A function that makes a finished run of two steps, with changes to it."""

    def make(name, rows=(), tensors=(), precision="fp32"):
        place = tmp_path / name
        changed = [row | dict(change) for row, change in zip(ROWS, rows or ({}, {}), strict=True)]
        place.mkdir()
        write_metrics(place / "metrics.csv", changed)
        save(TENSORS | dict(tensors), place / "checkpoints" / step_name(2), None)
        config = RunConfig(run_dir=str(place))
        return replace(config, trainer=TrainerConfig(max_steps=2, precision=precision))

    return make


def test_the_same_run_differs_in_its_times_alone(made):
    timed = [{"tokens_per_second": 9, "time/data": 1.0}, {"mfu": 0.1, "memory": 7.0}]
    assert compare(made("whole"), made("broken", timed), True) == ""


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        (({}, {"step": 3}), {}, "rows of steps [1, 3] instead of [1, 2]"),
        (({}, {"loss": 1.0000001}), {}, "loss at step 2: 1.0000001 instead of 1.0"),
        (({}, {"gradient_norm": 5.0}), {}, "gradient_norm at step 2: 5.0 instead of 4.0"),
        (({}, {"gradient_norm": ""}), {}, "gradient_norm at step 2: nan instead of 4.0"),
        ((), {"model.a": torch.tensor([0.0, 1.0, 3.0])}, "model.a differs in the last checkpoint"),
        (
            (), {"model.b": torch.ones(1)},
            "the last checkpoint holds other tensors: ['model.b']",
        ),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(made, rows, tensors, said):
    assert compare(made("whole"), made("broken", rows, tensors), True) == said


@pytest.mark.parametrize(
    ("precision", "loss", "said"),
    [
        ("fp32", 2.0019, ""),
        ("fp32", 2.0021, "loss at step 1: 2.0021 instead of 2.0"),
        ("bf16", 2.059, ""),
        ("bf16", 1.939, "loss at step 1: 1.939 instead of 2.0"),
    ],
)
def test_on_other_ranks_losses_are_the_same_up_to_rounding(made, precision, loss, said):
    broken = [{"loss": loss, "gradient_norm": 9.0}, {"gradient_norm": 1.0}]
    other = {"model.a": torch.zeros(3)}
    runs = made("whole", precision=precision), made("broken", broken, other, precision)
    assert compare(*runs, False) == said


def test_on_other_ranks_rows_count_too(made):
    broken = made("broken", ({}, {"phase": 1}))
    assert compare(made("whole"), broken, False) == "phase at step 2: 1 instead of 0"
