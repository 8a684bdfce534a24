"""Sums of losses over micro-batches, steps and skipped steps; threads of a run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from trainer.lightning.module import Tally


def stored(tally):
    """The state of a tally as a checkpoint's JSON holds it."""
    return json.loads(json.dumps(tally.state()))


def test_a_step_is_the_weighted_mean_over_all_its_tokens():
    tally = Tally()
    losses, weights = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1.0, 10.0, 1.0])
    for loss, weight in zip(losses, weights, strict=True):
        tally.add(loss.expand(1, 4), weight.expand(1, 4))
    loss, weight = tally.end_step()
    assert loss.item() == pytest.approx((2 + 40 + 6) / 12)
    assert weight.item() == pytest.approx(4)


def test_each_row_is_of_the_steps_since_the_one_before():
    """Losses begin anew; updates skipped are counted since the start."""
    tally, rows = Tally(), []
    for losses in ([1.0, 3.0], [5.0, math.nan, 7.0], [math.nan]):
        for loss in losses:
            tally.add(torch.full((1, 4), loss), torch.ones(1, 4))
            value, _ = tally.end_step()
            tally.end_update(torch.tensor(loss), ~value.isfinite())
        read = tally.read()
        rows.append((read["loss"], read["skipped_steps"]))
    assert rows[:2] == [(2.0, 0), (6.0, 1)]
    assert math.isnan(rows[2][0])
    assert rows[2][1] == 2
    # What a checkpoint between two rows has is of the row that has begun.
    again = Tally()
    again.load(stored(tally), torch.device("cpu"))
    for counter in (tally, again):
        counter.add(torch.full((1, 4), 4.0), torch.ones(1, 4))
        counter.end_step()
        counter.end_update(torch.tensor(1.0), torch.tensor(False))
    assert again.read() == tally.read()
    assert again.read()["skipped_steps"] == 2


def test_updates_that_were_skipped_are_counted_in_a_row_and_since_the_start():
    tally, counted = Tally(), []
    for skipped in (True, True, False, True):
        tally.add(torch.ones(1, 4), torch.ones(1, 4))
        tally.end_step()
        tally.end_update(torch.tensor(2.0), torch.tensor(skipped))
        counted.append((tally.skipped_in_a_row(), tally.read()["skipped_steps"]))
    assert counted == [(1, 1), (2, 2), (0, 2), (1, 3)]
