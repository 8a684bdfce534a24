"""The speed of training is measured on the program's own step."""

from __future__ import annotations

import pytest
import torch

from trainer.lightning.speed import measure_step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_micro_batch_and_an_update_take_time_and_draw_nothing(tiny_decoder, precision):
    model, before = tiny_decoder(), torch.get_rng_state()
    times = measure_step(model.config, model.layout, (2, 16), "cpu", precision, seconds=0.0)
    assert 0 < times.micro_batch < 60
    assert 0 < times.update < 60
    assert torch.equal(torch.get_rng_state(), before)
