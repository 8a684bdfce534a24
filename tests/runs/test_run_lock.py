"""One job trains in a run directory, whatever the file system knows of locks on other nodes."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trainer.common.errors import UserError
from trainer.runs import run_lock
from trainer.runs.run_lock import LEASE, POLL, RunLock


@pytest.fixture(params=["on the node alone", "nowhere"])
def lock_keeping(request, monkeypatch):
    """Where the file system keeps locks: another node's process is not known to either."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "nowhere":
        monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def locks(monkeypatch):
    """Makes the lock of a process on some node, of some job; all are released."""
    made = []

    def lock(host, job=None, restarts=None):
        about = os.uname()
        with monkeypatch.context() as patch:
            patch.setattr(os, "uname", lambda: type(about)((about[0], host, *about[2:])))
            if job:
                patch.setenv("SLURM_JOB_ID", job)
            if restarts:
                patch.setenv("SLURM_RESTART_COUNT", restarts)
            made.append(RunLock())
        return made[-1]

    yield lock
    for lock in made:
        lock.release()


def ended(lock, directory):
    """What a process leaves whose node was cut off: the lock, for which nobody cares any more."""
    content = (directory / ".lock").read_text()
    lock.release()
    (directory / ".lock").write_text(content)


def silent_for(directory, seconds):
    then = time.time() - seconds
    os.utime(directory / ".lock", (then, then))


def test_a_run_directory_is_locked_once_however_often_it_is_asked_for(tmp_path, locks):
    lock, other = locks("gpu07"), locks("gpu07")
    lock.acquire(tmp_path)
    lock.acquire(tmp_path)
    with pytest.raises(UserError, match=r"run_dir: process \d+ of gpu07 is training in"):
        other.acquire(tmp_path)
    lock.release()
    other.acquire(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Let time pass in sleeps alone; ``clock.on_second`` is called with the seconds slept."""
    passed = SimpleNamespace(seconds=0.0, on_second=lambda seconds: None)

    def sleep(seconds):
        passed.seconds += seconds
        passed.on_second(passed.seconds)

    clocks = SimpleNamespace(time=time.time, monotonic=lambda: passed.seconds, sleep=sleep)
    monkeypatch.setattr(run_lock, "time", clocks)
    return passed


def test_another_node_is_refused_while_the_first_lives_and_is_told_who_that_is(
    tmp_path, locks, lock_keeping, clock, caplog
):
    caplog.set_level(logging.INFO)
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)  # of which only the file is seen from there
    silent_for(tmp_path, 100)
    clock.on_second = lambda seconds: silent_for(tmp_path, 0) if seconds >= 15 else None
    message = r"process \d+ of gpu07 \(SLURM job 17\) is training in .* sign of life came 0 s ago"
    with pytest.raises(UserError, match=message):
        locks("gpu08", job="18").acquire(tmp_path)
    assert 15 <= clock.seconds <= 16
    assert "waiting up to 80 s for a sign of life" in caplog.text


def test_the_next_job_waits_for_the_lease_of_one_that_was_killed_on_another_node(
    tmp_path, locks, lock_keeping, clock
):
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    silent_for(tmp_path, 100)
    locks("gpu08", job="18").acquire(tmp_path)
    assert clock.seconds == pytest.approx(LEASE - 100 + POLL, abs=1)
    assert json.loads((tmp_path / ".lock").read_text())["host"] == "gpu08"


def test_of_two_that_wait_one_takes_the_lock_though_both_see_the_silence_end(
    tmp_path, locks, lock_keeping, clock
):
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    silent_for(tmp_path, 100)
    other = json.dumps({"process": 1, "host": "gpu09", "job": "19"})

    def on_second(seconds):
        if "gpu08" in (tmp_path / ".lock").read_text():  # both have written
            (tmp_path / ".lock").write_text(other)

    clock.on_second = on_second
    with pytest.raises(UserError, match=r"process 1 of gpu09 \(SLURM job 19\) is training in"):
        locks("gpu08", job="18").acquire(tmp_path)
    assert (tmp_path / ".lock").read_text() == other


@pytest.mark.parametrize("is_writing", [True, False])
def test_who_waits_tells_a_release_from_a_lock_that_is_being_written(
    tmp_path, locks, lock_keeping, clock, is_writing
):
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    silent_for(tmp_path, 100)
    contents = iter(["", json.dumps({"process": 1, "host": "gpu09", "job": "19"})])

    def on_second(seconds):
        if seconds == 5 or (seconds == 6 and is_writing):
            (tmp_path / ".lock").write_text(next(contents))

    clock.on_second = on_second
    with pytest.raises(UserError, match="is training in") if is_writing else nullcontext():
        locks("gpu08", job="18").acquire(tmp_path)
    assert clock.seconds == (6 if is_writing else 7)


def test_a_lock_of_a_dead_node_blocks_no_longer_than_the_lease(tmp_path, locks, lock_keeping):
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    silent_for(tmp_path, LEASE + 1)
    locks("gpu08", job="18").acquire(tmp_path)
    assert json.loads((tmp_path / ".lock").read_text())["host"] == "gpu08"


def test_a_job_that_was_started_again_never_waits_for_itself(tmp_path, locks, lock_keeping):
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    locks("gpu08", job="17", restarts="1").acquire(tmp_path)


def test_two_steps_of_one_job_are_two(tmp_path, locks, lock_keeping, clock):
    first = locks("gpu07", job="17", restarts="1")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    clock.on_second = lambda seconds: silent_for(tmp_path, 0)
    with pytest.raises(UserError, match="gpu07"):
        locks("gpu08", job="17", restarts="1").acquire(tmp_path)


def test_nor_where_the_file_system_still_keeps_the_lock_for_the_dead_node(tmp_path, locks):
    locks("gpu07", job="17").acquire(tmp_path)
    with pytest.raises(UserError, match="gpu07"):
        locks("gpu08", job="18").acquire(tmp_path)
    locks("gpu08", job="17", restarts="1").acquire(tmp_path)


def test_a_process_that_was_killed_here_blocks_nobody_here(tmp_path, locks):
    first = locks("gpu07")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    locks("gpu07").acquire(tmp_path)


@pytest.mark.parametrize("alive", [True, False])
def test_where_nothing_keeps_locks_a_process_of_this_node_is_looked_for(
    tmp_path, locks, monkeypatch, alive
):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    first = locks("gpu07", job="17")
    first.acquire(tmp_path)
    ended(first, tmp_path)
    monkeypatch.setattr(run_lock, "is_running", lambda process: alive)
    if alive:
        with pytest.raises(UserError, match="is training in"):
            locks("gpu07", job="17").acquire(tmp_path)
    else:
        locks("gpu07", job="17").acquire(tmp_path)


def test_whoever_trains_gives_signs_of_life_and_ends_when_another_took_over(
    tmp_path, locks, monkeypatch
):
    monkeypatch.setattr(run_lock, "BEAT", 0.01)
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    first = locks("gpu07")
    first.acquire(tmp_path)
    silent_for(tmp_path, 1000)
    wait_until(lambda: time.time() - (tmp_path / ".lock").stat().st_mtime < 500)
    assert not codes
    other = {"process": 1, "host": "gpu08", "job": None}
    (tmp_path / ".lock").write_text(json.dumps(other))
    wait_until(lambda: codes)
    assert set(codes) == {1}
    first.release()
    assert json.loads((tmp_path / ".lock").read_text()) == other


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
