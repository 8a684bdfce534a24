"""A live bar on a terminal, a line at every tenth of the work elsewhere."""

from __future__ import annotations

import io
import logging
from itertools import pairwise

import pytest
from rich.console import Console
from rich.logging import RichHandler

from trainer.common import progress
from trainer.common.progress import LONGEST_SILENCE, Progress, show_log


@pytest.fixture
def spoken(monkeypatch):
    """Run ``steps`` of ``seconds`` each on a clock of one's own; the times at which a line came."""

    def go(steps, seconds, *, begin=0, terminal=False, first=True):
        now, out = [0.0], io.StringIO()
        console = Console(file=out, width=200, force_terminal=terminal, legacy_windows=False)
        monkeypatch.setattr(progress, "console", console)
        monkeypatch.setenv("RANK", "0" if first else "1")
        monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
        times = []
        with Progress("Training [i]", steps, 10.0) as bar:
            bar.advance_to(begin)
            for step in range(begin + 1, steps + 1):
                now[0] += seconds
                before = out.tell()
                bar.advance_to(step, loss=1.0)
                times += [now[0]] * (out.tell() > before)
        return times, out.getvalue()

    return go


def test_a_log_gets_a_line_every_tenth_and_is_not_silent_for_long(spoken):
    times, text = spoken(100, 0.1)
    assert times == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert text.splitlines()[0] == "Training [i]  10%  loss 1.000  100 tokens/s  9 s left"
    times, _ = spoken(20_000, 1.0)
    assert max(b - a for a, b in pairwise(times)) <= LONGEST_SILENCE + 1
    assert spoken(100, 0.1, first=False) == ([], "")


def test_resumed_work_counts_from_where_it_began(spoken):
    _, text = spoken(200, 0.2, begin=100)
    assert text.splitlines()[0] == "Training [i]  60%  loss 1.000  50 tokens/s  16 s left"


def test_a_terminal_has_a_live_bar_that_goes_away(spoken):
    _, text = spoken(20, 0.1, terminal=True)
    assert "Training [i]" in text
    assert "tokens/s" in text
    assert text.endswith("\x1b[2K")
    assert spoken(20, 0.1, terminal=True, first=False)[1] == ""


def test_the_log_is_shown_once_and_of_other_ranks_only_errors(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=shown, width=60))
    logger = logging.getLogger("trainer")
    for is_first in (True, True, False):
        monkeypatch.setenv("RANK", "0" if is_first else "1")
        show_log()
        logger.info("Of a step, rank %d", not is_first)
    logger.error("Of any rank")
    assert [type(handler) for handler in logger.handlers] == [RichHandler]
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]  # no time, no level, no path
    assert lines == ["Of a step, rank 0", "Of a step, rank 0", "Of any rank"]
