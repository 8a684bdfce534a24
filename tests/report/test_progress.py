"""Where no bar can be drawn, lines come often enough for a person and rarely enough for a log."""

from __future__ import annotations

import errno
import io
import os
from itertools import pairwise

import pytest
from rich.console import Console

from trainer.report import progress
from trainer.report.progress import Progress


@pytest.fixture
def spoken(monkeypatch):
    """Run ``steps`` of ``seconds`` each on a clock of one's own; the times at which a line came."""

    def go(steps, seconds, **options):
        now, out = [0.0], io.StringIO()
        monkeypatch.setattr(progress, "console", Console(file=out, width=200))
        monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
        times = []
        with Progress("Training", steps, 10.0, **options) as bar:
            bar.advance_to(0)
            for step in range(1, steps + 1):
                now[0] += seconds
                before = out.tell()
                bar.advance_to(step, loss=1.0)
                times += [now[0]] * (out.tell() > before)
        return times, out.getvalue()

    return go


def test_short_work_says_every_tenth(spoken):
    times, text = spoken(100, 0.1)
    assert times == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert text.splitlines()[0] == "Training  10%  loss 1.000  100 tokens/s  9 s left"


def test_long_work_speaks_early_and_is_never_silent_for_more_than_ten_minutes(spoken):
    times, _ = spoken(100_000, 1.0)
    assert times[0] <= 31
    assert max(b - a for a, b in pairwise(times)) <= 601
    assert len(times) < 200


def test_other_processes_than_the_first_say_nothing(spoken):
    assert spoken(100, 0.1, silent=True) == ([], "")


def test_a_full_disk_stops_no_work(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress, "console", Console(file=Full()))
    with Progress("a", 2) as bar:
        for step in range(3):
            bar.advance_to(step)


def test_a_title_is_shown_as_it_is(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, width=99))
    with Progress("[bold]a[/x]", 1) as bar:
        bar.advance_to(0)
        bar.advance_to(1)
    assert out.getvalue().startswith("[bold]a[/x]  100%")
