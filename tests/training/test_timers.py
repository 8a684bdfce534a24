"""Where the time of a step goes, on a clock of one's own."""

import pytest

from trainer.training import timers
from trainer.training.timers import StepTimer


def test_every_second_belongs_to_the_part_that_was_entered_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
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
