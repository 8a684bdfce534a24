"""The log on the terminal, and a line in it at every tenth of long work."""

from __future__ import annotations

import io
import logging
import sys
from itertools import pairwise

import pytest

from trainer.common import progress
from trainer.common.progress import LONGEST_SILENCE, Progress, show_log


@pytest.fixture
def logged(monkeypatch, caplog):
    """Run ``steps`` of ``seconds`` each on a clock of one's own; the times and texts of lines."""

    def go(steps, seconds, *, begin=0):
        now, times = [0.0], []
        monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
        caplog.clear()
        bar = Progress("Training", steps, 10.0)
        bar.advance_to(begin)
        for step in range(begin + 1, steps + 1):
            now[0] += seconds
            before = len(caplog.messages)
            bar.advance_to(step, loss=1.0)
            times += [now[0]] * (len(caplog.messages) - before)
        return times, caplog.messages

    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    caplog.set_level("INFO", "trainer")
    return go


def test_a_log_gets_a_line_every_tenth_and_is_not_silent_for_long(logged):
    times, lines = logged(100, 0.1)
    assert times == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert lines[0] == "Training  10%  loss 1.000  100 tokens/s  9 s left"
    times, _ = logged(20_000, 1.0)
    assert max(b - a for a, b in pairwise(times)) <= LONGEST_SILENCE + 1


def test_resumed_work_counts_from_where_it_began(logged):
    _, lines = logged(200, 0.2, begin=100)
    assert lines[0] == "Training  60%  loss 1.000  50 tokens/s  16 s left"


def test_the_log_is_shown_once_and_of_other_ranks_only_errors(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    logger = logging.getLogger("trainer")
    monkeypatch.setattr(logger, "handlers", [])
    for is_first in (True, True, False):
        monkeypatch.setattr(progress, "is_first_process", lambda is_first=is_first: is_first)
        show_log()
        logger.info("Of a step, rank %d", not is_first)
    logger.error("Of any rank")
    lines = shown.getvalue().splitlines()  # no time, no level
    assert lines == ["Of a step, rank 0", "Of a step, rank 0", "Of any rank"]
