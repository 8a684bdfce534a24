"""The speed of training is measured on the program's own step."""

from __future__ import annotations

import pytest
import torch

from trainer.config import OptimizerConfig
from trainer.lightning import speed


def measure(model, shape, seconds, precision="fp32"):
    return speed.measure_step(
        model.config,
        model.layout,
        shape,
        device="cpu",
        precision=precision,
        optimizer=OptimizerConfig(),
        seconds=seconds,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_micro_batch_and_an_update_take_time_and_draw_nothing(tiny_decoder, precision):
    model, before = tiny_decoder(), torch.get_rng_state()
    times = measure(model, (2, 16), 0.0, precision)
    assert 0 < times.micro_batch < 60
    assert 0 < times.update < 60
    assert torch.equal(torch.get_rng_state(), before)
