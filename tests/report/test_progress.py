"""Where no bar can be drawn, lines come often enough for a person and rarely enough for a log."""

from __future__ import annotations

import errno
import io
import os
from itertools import pairwise

import pytest
from rich.console import Console

from trainer.common import progress
from trainer.common.progress import Progress


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
    assert times[:9] == [30, 60, 120, 240, 480, 960, 1560, 2160, 2760]
    assert max(b - a for a, b in pairwise(times)) == 600
    assert {10_000.0 * tenth for tenth in range(1, 11)} <= set(times)
    assert len(times) < 200


def test_the_time_left_is_renewed_before_a_quarter_of_it_has_passed(spoken):
    """Tenths of 900 seconds are too far apart for "417 s left"; the end is silent for 30 s."""
    times, text = spoken(900, 1.0)
    left = [float(line.split()[-3]) for line in text.splitlines()]
    gaps = [b - a for a, b in pairwise(times)]
    assert all(gap <= max(seconds / 4, 30) + 1 for gap, seconds in zip(gaps, left, strict=False))
    assert len(times) < 25


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


def shown(monkeypatch, *steps, terminal=False, silent=False):
    """What a task of 200 steps of ten tokens says at (step, seconds, options), and its bar."""
    now, out = [100.0], io.StringIO()
    console = Console(file=out, width=99, force_terminal=terminal, legacy_windows=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with Progress("Training [i]", 200, 10.0, silent=silent) as bar:
        for step, seconds, options in steps:
            now[0] = 100.0 + seconds
            bar.advance_to(step, **options)
        tasks = bar.bar.tasks if bar.bar else []
        tasks_shown = [(t.description, t.completed, t.total, t.fields["details"]) for t in tasks]
        columns = bar.bar.columns if bar.bar else ()
    assert bar.bar is None or bar.bar.finished or not bar.bar.live.is_started
    return tasks_shown, columns, out.getvalue()


def test_a_terminal_has_a_live_bar(monkeypatch):
    tasks_shown, columns, text = shown(
        monkeypatch, (0, 0, {}), (40, 2, {"loss": 4.5678}), (300, 4, {"loss": 4.0}), terminal=True
    )
    assert tasks_shown == [("Training [i]", 200, 200, "loss 4.000  500 tokens/s")]
    assert columns[1].bar_width == 24
    assert "Training [i]" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert text.endswith("\x1b[2K")  # and the bar is gone
    assert shown(monkeypatch, (0, 0, {}), (9, 2, {}), terminal=True, silent=True)[::2] == ([], "")
    ((_, completed, total, details),), *_ = shown(monkeypatch, terminal=True)
    assert (completed, total, details) == (0, 200, "")


def test_a_resumed_task_counts_from_where_it_began(monkeypatch):
    """From step 100 on, of 200: a line at the next tenth, of what was done since."""
    *_, text = shown(
        monkeypatch, (100, 0, {}), (119, 2, {}), (120, 4, {"loss": 2.0}), (140, 8, {"tokens": 64})
    )
    assert text.splitlines() == [
        "Training [i]  60%  loss 2.000  50 tokens/s  16 s left",
        "Training [i]  70%  8 tokens/s  12 s left",
    ]


def test_without_time_or_steps_there_is_no_rate(monkeypatch):
    *_, text = shown(monkeypatch, (0, 0, {}), (20, 0, {}), (20, 50, {}))
    assert text.splitlines() == [
        "Training [i]  10%  0 tokens/s  0 s left",
        "Training [i]  10%  4 tokens/s  450 s left",
    ]
    assert shown(monkeypatch, (0, 0, {}), (0, 50, {}))[2] == ""


def test_lines_and_bars_go_where_the_log_does():
    assert progress.console.stderr
