"""Where the time of a step goes, on a clock of one's own."""

import pytest
import torch

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


def test_on_a_gpu_the_stream_tells_the_time_and_is_waited_for_once(monkeypatch):
    """Events, which tell milliseconds between each other; the host's clock is not asked."""
    now, waited = [0.0], []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            waited.append(self.at)

        def elapsed_time(self, later):
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(timers.time, "perf_counter", pytest.fail)
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
