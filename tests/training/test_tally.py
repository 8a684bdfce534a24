"""Sums of losses over micro-batches, steps and skipped steps."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from trainer.common.fields import adapter
from trainer.runs.saved_state import SavedTally
from trainer.training import tally as tallies
from trainer.training.tally import Spikes, StepTimer, Tally


def stored(tally):
    """The state of a tally as a checkpoint's JSON holds it."""
    return adapter(SavedTally).validate_json(json.dumps(asdict(tally.state())))


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


def test_each_row_is_of_the_steps_since_the_one_before():
    """Losses, their parts and spikes begin anew; updates skipped are counted since the start."""
    tally, rows = Tally(), []
    for losses in ([1.0, 3.0], [5.0, math.nan, 7.0], [math.nan]):
        for loss in losses:
            row = torch.tensor([[loss, loss, 2 * loss, 2 * loss]])
            tally.add(row, torch.ones(1, 4))
            value, _ = tally.end_step()
            tally.end_update(value, torch.tensor(loss), ~value.isfinite())
        read = tally.read()
        parts = [read.get(f"loss/quarter_{i}") for i in (1, 4)]
        rows.append((read["loss"], *parts, read["skipped_steps"]))
    assert rows[:2] == [(3.0, 2.0, 4.0, 0), (9.0, 6.0, 12.0, 1)]
    assert all(map(math.isnan, rows[2][:3]))
    assert rows[2][3] == 2
    # What a checkpoint between two rows has is of the row that has begun.
    again = Tally()
    again.load(stored(tally), torch.device("cpu"))
    for counter in (tally, again):
        counter.add(torch.full((1, 4), 4.0), torch.ones(1, 4))
        counter.end_update(*counter.end_step()[:1], torch.tensor(1.0), torch.tensor(False))
    assert again.read() == tally.read()
    assert again.read()["skipped_steps"] == 2


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


def test_tokens_weigh_in_the_parts_of_the_sequence_too():
    """(1 * 2 + 3 * 4) / (1 + 3) in the first part of four, whose weights add up over steps."""
    tally = Tally()
    for loss, weight in ((2.0, 1.0), (4.0, 3.0)):
        weights = torch.ones(1, 4)
        weights[0, 0] = weight
        tally.add(torch.tensor([[loss, 0.0, 0.0, 8.0]]), weights)
        tally.end_step()
    row = tally.read()
    assert [row[f"loss/quarter_{i}"] for i in (1, 2, 3, 4)] == [3.5, 0, 0, 8]
    assert row["loss"] == pytest.approx(((2 + 8) / 4 + (12 + 8) / 6) / 2)


def test_updates_that_were_skipped_are_counted_in_a_row_and_since_the_start():
    tally, counted = Tally(), []
    for skipped in (True, True, False, True):
        tally.add(torch.ones(1, 4), torch.ones(1, 4))
        tally.end_step()
        tally.end_update(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(skipped))
        counted.append((tally.skipped_in_a_row(), tally.read()["skipped_steps"]))
    assert counted == [(1, 1), (2, 2), (0, 2), (1, 3)]


def test_spikes_are_a_share_of_the_steps_of_a_row():
    tally = Tally()

    def step(loss, norm):
        tally.add(torch.full((1, 4), loss), torch.ones(1, 4))
        tally.end_update(*tally.end_step()[:1], torch.tensor(norm), torch.tensor(False))

    for number in range(128):
        step(1 + number % 2, 1.0 + number % 2)
    tally.read()
    for loss, norm in ((1.0, 1.0), (90.0, 1.0), (1.0, 1.0), (1.0, 1.0)):
        step(loss, norm)
    step(1.0, 900.0)
    row = tally.read()
    assert (row["loss_spikes"], row["gradient_spikes"]) == pytest.approx((0.2, 0.2))
    step(1.0, 1.0)
    row = tally.read()
    assert (row["loss_spikes"], row["gradient_spikes"]) == (0, 0)


def test_a_tally_of_nothing():
    tally = Tally()
    row = tally.read()
    assert math.isnan(row.pop("loss"))
    assert math.isnan(row.pop("gradient_norm"))
    assert row == {"skipped_steps": 0, "loss_spikes": 0, "gradient_spikes": 0}
    other = Tally()
    other.load(stored(tally), torch.device("cpu"))
    assert other.state() == tally.state()
    assert other.spikes.seen == 0
    assert other.skipped_in_a_row() == 0


def test_a_mean_over_ranks_is_their_sum_over_their_number(monkeypatch):
    ranks = [True, 4]
    monkeypatch.setattr(tallies.dist, "is_initialized", lambda: ranks[0])
    monkeypatch.setattr(tallies.dist, "get_world_size", lambda: ranks[1])
    monkeypatch.setattr(tallies.dist, "all_reduce", lambda x: x.add_(9))
    x = torch.tensor([3.0])
    assert tallies.mean_over_ranks(x) is x
    assert x.item() == 3
    for ranks[:] in ([True, 1], [False, 4]):
        assert tallies.mean_over_ranks(torch.tensor([3.0])).item() == 3


def test_every_second_belongs_to_the_part_that_was_entered_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tallies.time, "perf_counter", lambda: now[0])
    timer = StepTimer()
    for part, seconds in (("data", 1), ("compute", 5), ("optimizer", 2), ("data", 3)):
        timer.enter(part)
        now[0] += seconds
    timer.enter("compute")
    expected = {"data": 4, "compute": 5, "optimizer": 2, "checkpoint": 0, "monitor": 0}
    assert timer.read() == pytest.approx(expected)
    now[0] += 7
    timer.enter("checkpoint")
    assert timer.read()["compute"] == pytest.approx(7)


def test_on_a_gpu_the_stream_tells_the_time_and_is_waited_for_once(monkeypatch):
    """Events, which tell milliseconds between each other; the host's clock is not asked."""
    now, waited = [0.0], []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.time = now[0]

        def synchronize(self):
            waited.append(self.time)

        def elapsed_time(self, later):
            return 1000 * (later.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(tallies.time, "perf_counter", pytest.fail)
    timer = StepTimer()
    assert set(timer.read().values()) == {0.0}
    for part, seconds in (("data", 1), ("compute", 5), ("data", 3)):
        timer.enter(part)
        now[0] += seconds
    timer.enter("monitor")
    assert waited == []
    expected = {"data": 4, "compute": 5, "optimizer": 0, "checkpoint": 0, "monitor": 0}
    assert timer.read() == pytest.approx(expected)
    assert waited == [9]
    now[0] += 2
    timer.enter("data")
    assert timer.read() == pytest.approx(dict.fromkeys(expected, 0) | {"monitor": 2})


@pytest.mark.parametrize(("there", "used"), [(False, True), (True, False)])
def test_a_gpu_that_is_not_used_is_not_asked(monkeypatch, there, used):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("asked"))
    timer = StepTimer()
    timer.enter("data")
    timer.enter("compute")
    assert timer.read()["data"] > 0
