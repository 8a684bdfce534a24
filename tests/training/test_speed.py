"""The speed of training is measured on the program's own step."""

from __future__ import annotations

import pytest
import torch

from trainer.config import OptimizerConfig
from trainer.training import speed


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


def test_micro_batches_are_repeated_for_the_seconds_and_their_median_counts(
    tiny_decoder, monkeypatch
):
    model, taken = tiny_decoder(), []
    clock = iter([7.0, 1.0, 9.0, 2.0, 5.0])  # an update, three micro-batches, an update

    def timed(work, device):
        work()
        taken.append(next(clock))
        return taken[-1]

    monkeypatch.setattr(speed, "timed", timed)
    times = measure(model, (1, 8), 12.0)
    assert taken == [7.0, 1.0, 9.0, 2.0, 5.0]
    assert times == speed.Times(2.0, 5.0)


def test_the_peak_of_a_processor_is_that_of_its_fastest_product(monkeypatch):
    clock = iter([0.08, 0.05, 0.1])
    monkeypatch.setattr(speed, "timed", lambda work, device: next(clock))
    threads = torch.get_num_threads()
    assert speed.product_peak(2) == pytest.approx(2 * 768**3 / 0.05)
    assert torch.get_num_threads() == threads
    assert next(clock, None) is None


@pytest.mark.parametrize(("bf16", "is_fast"), [(0.4e9, False), (0.6e9, True), (2e9, True)])
def test_bf16_is_fast_from_half_the_speed_of_float32(monkeypatch, bf16, is_fast):
    peaks = {torch.float32: 1e9, torch.bfloat16: bf16}
    monkeypatch.setattr(speed, "product_peak", lambda threads, dtype=torch.float32: peaks[dtype])
    assert speed.multiplies_bf16_fast(2) is is_fast
