"""Sums of losses over micro-batches, steps and skipped steps."""

import json
import math

import numpy as np
import pytest
import torch

from trainer.training import tally as tallies
from trainer.training.tally import Spikes, Tally


def test_a_step_is_the_weighted_mean_over_all_its_tokens():
    tally = Tally()
    losses, weights = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1.0, 10.0, 1.0])
    for loss, weight in zip(losses, weights, strict=True):
        tally.add(loss.expand(1, 4), weight.expand(1, 4))
    loss, weight = tally.end_step()
    assert loss.item() == pytest.approx((2 + 40 + 6) / 12)
    assert weight.item() == pytest.approx(4)


def test_ranks_are_averaged_before_the_division(monkeypatch):
    """This rank has weight 1 and loss 2; the other one weight 3 and loss 4."""
    tally = Tally()
    tally.add(torch.full((2, 4), 2.0), torch.ones(2, 4))
    other = torch.tensor([12.0, 3.0])
    monkeypatch.setattr(tallies, "mean_over_ranks", lambda mine: (mine + other) / 2)
    loss, _ = tally.end_step()
    assert loss.item() == pytest.approx((2 + 12) / 4)


def test_a_row_is_the_mean_of_the_finite_steps():
    tally = Tally()
    for loss in (1.0, math.nan, 3.0, math.inf):
        tally.add(torch.full((1, 4), loss), torch.ones(1, 4))
        value, _ = tally.end_step()
        tally.end_update(value, torch.tensor(0.5), ~value.isfinite())
        assert tally.skipped_in_a_row() == (not math.isfinite(loss))
    row = tally.read()
    assert (row["loss"], row["gradient_norm"], row["skipped_steps"]) == (2.0, 0.5, 2)
    assert math.isnan(tally.read()["loss"])


def test_the_state_goes_on_in_the_middle_of_a_row():
    whole, first, second = Tally(), Tally(), Tally()
    for index, loss in enumerate((1.1, 2.3, 3.7)):
        parts = (whole, first) if index < 2 else (whole, second)
        if index == 2:
            second.load(json.loads(json.dumps(first.state())), torch.device("cpu"))
        for tally in parts:
            tally.add(torch.tensor([[loss, 1.0, 2.0, 3.0]]), torch.ones(1, 4))
            value, _ = tally.end_step()
            tally.end_update(value, torch.tensor(loss), ~value.isfinite())
    assert second.read() == whole.read()


def test_losses_are_told_apart_by_position():
    tally = Tally()
    tally.add(torch.arange(8.0).expand(3, 8), torch.ones(3, 8))
    tally.end_step()
    row = tally.read()
    assert [row[f"loss/quarter_{i}"] for i in (1, 2, 3, 4)] == [0.5, 2.5, 4.5, 6.5]


def test_a_spike_is_six_deviations_above_the_last_128_steps():
    """Against numpy's mean and deviation of the window, value by value."""
    generator = np.random.default_rng(0)
    values = generator.normal(3.0, 0.1, size=400)
    values[[150, 151, 300]] = [4.0, 9.0, 3.65]
    values[200] = math.nan
    spikes, window, expected = Spikes(), [], 0
    for value in values:
        spikes.add(torch.tensor([value, 0.0]))
        last = np.array(window[-128:])
        if len(last) == 128 and math.isfinite(value):
            expected += value > last.mean() + 6 * last.std(ddof=1)
        window.append(value if math.isfinite(value) else last.mean())
    assert expected >= 2
    assert spikes.count.tolist() == [expected, 0]
