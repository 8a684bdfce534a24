"""Claims are one process's each, and what processes did is told."""

from __future__ import annotations

import logging
import os
import time
from types import SimpleNamespace

import pytest

from trainer.evaluation import sharing
from trainer.evaluation.sharing import Claims, Share, idle_share


def test_a_job_is_claimed_once_in_an_attempt(tmp_path):
    first, second = (Claims(tmp_path, Share(index, 2, "a")) for index in range(2))
    assert [first.take("cell", {"x": 1}), second.take("cell", {"x": 1})] == [True, False]
    assert [second.take("cell", {"x": 2}), first.take("part", {"x": 2})] == [True, True]
    assert not first.take("cell", {"x": 2})


def test_claims_of_an_earlier_attempt_mean_nothing_and_are_removed_after_a_day(tmp_path):
    Claims(tmp_path, Share(0, 2, "killed")).take("cell", 1)
    other = Claims(tmp_path, Share(1, 2, "beside"))  # another evaluation into the same store
    yesterday = time.time() - 86500
    os.utime(tmp_path / "claims-killed", (yesterday, yesterday))
    later = Claims(tmp_path, Share(0, 2, "restarted"))
    assert later.take("cell", 1)
    assert other.take("cell", 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["claims-beside", "claims-restarted"]


def test_one_process_claims_everything_and_writes_nothing(tmp_path):
    claims = Claims(tmp_path, Share())
    assert claims.take("cell", 1)
    claims.leave()
    claims.wait_for_others()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("worked", "seconds", "idle"),
    [([10.0, 10.0], 10.0, 0.0), ([10.0, 5.0], 10.0, 0.25), ([1.0] * 4, 4.0, 0.75)],
)
def test_idle_is_the_time_in_which_a_process_had_nothing_to_do(worked, seconds, idle):
    assert idle_share(worked, seconds) == pytest.approx(idle)


def test_the_first_waits_for_the_others_and_says_how_long_all_were_idle(
    tmp_path, monkeypatch, caplog
):
    """On a clock by hand: both begin at 0, the first works for 8 s, the other for 9 - 3 s."""
    clock = SimpleNamespace(now=0.0, looks=0)
    monkeypatch.setattr(sharing, "POLL", 1.0)
    monkeypatch.setattr(sharing.time, "perf_counter", lambda: clock.now)
    first, other = (Claims(tmp_path, Share(index, 2, "a")) for index in range(2))

    def sleep(seconds):
        assert seconds == 1.0
        clock.looks += 1
        if clock.looks == 5:
            clock.now = 9.0
            other.leave()
            clock.now = 10.0

    monkeypatch.setattr(sharing.time, "sleep", sleep)
    for _ in range(3):
        other.pause()
    clock.now = 8.0
    first.leave()
    caplog.set_level(logging.INFO, logger=sharing.__name__)
    first.wait_for_others()
    assert [record.getMessage() for record in caplog.records] == [
        "1 of the other processes are still at work",
        "2 processes evaluated for 10.0 s and were idle for 30% of it (at work: 8.0, 6.0 s)",
    ]
    assert list(tmp_path.iterdir()) == []
