"""Ranks end together, however one of them ends, and one of them says why."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.program import run_ranks
from trainer.common.watch import End, Hub, first_of

SCRIPT = Path(__file__).with_name("watched.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "codes", "speaker", "said"),
    [
        (["1:killed"], [1, -9, 1], 0, "error: rank 1 ("),
        (["0:killed"], [-9, 1, 1], 1, "error: rank 0 ended"),
        (["2:failed"], [1, 1, 1], 2, "error of rank 2"),
        (["0:failed"], [1, 1, 1], 0, "error of rank 0"),
        (["1:SIGUSR1"], [85, 85, 85], 1, "stop of rank 1"),
        (["0:SIGUSR1", "1:SIGTERM", "2:SIGUSR1"], [85, 85, 85], 1, "stop of rank 1"),
        (["0:done", "1:done", "2:done"], [0, 0, 0], None, ""),
        (["0:done", "1:done", "2:late"], [0, 0, 0], None, ""),
    ],
)
def test_all_ranks_end_with_one_and_one_tells(tmp_path, ends, codes, speaker, said):
    done = run_ranks(3, SCRIPT, *ends, cwd=tmp_path)
    assert [rank.returncode for rank in done] == codes
    for number, rank in enumerate(done):
        assert bool(rank.stderr) == (number == speaker), rank.stderr
    if speaker is not None:
        assert done[speaker].stderr.startswith(said)
    # Rank 0 may requeue the job; SIGTERM on any rank decides that it does not.
    expected = {"1:SIGUSR1": "requeue: SIGUSR1\n", "0:SIGUSR1": "requeue: SIGTERM\n"}
    assert done[0].stdout == expected.get(ends[0], "")


DEAD = End(1, "died", text="rank 1")
FAILED = End(2, "failed")


@pytest.mark.parametrize(
    ("early", "answer"),
    [
        ([FAILED, End(0, "failed")], FAILED),
        ([FAILED, DEAD], End(0, "died", text="rank 1")),
        ([DEAD, End(0, "died", text="rank 0")], End(2, "died", text="rank 1; rank 0")),
        ([End(0, "stopped", 85, "SIGUSR1"), FAILED], FAILED),
        (
            [End(0, "stopped", 85, "SIGUSR1"), End(1, "stopped", 85, "SIGTERM")],
            End(1, "stopped", 85, "SIGTERM"),
        ),
        (
            [End(1, "stopped", 85, "time limit"), End(0, "stopped", 85, "time limit")],
            End(0, "stopped", 85, "time limit"),
        ),
    ],
)
def test_a_death_counts_before_errors_and_these_before_stops(early, answer):
    assert first_of(early, 3) == answer


class Values(dict):
    def set(self, key, value):
        self[key] = value


def test_ranks_that_do_not_start_are_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("trainer.common.watch.START", 0.1)
    hub = Hub(4, Values())
    hub.events.put(0)
    hub.events.put(2)
    answer = []
    thread = threading.Thread(target=lambda: answer.append(hub._first_end()))
    thread.start()
    thread.join(5)
    assert (answer[0].rank, answer[0].kind) == (0, "failed")
    assert "of 4, 1, 3 did not start" in answer[0].text
