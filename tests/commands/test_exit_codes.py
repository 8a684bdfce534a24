"""How the program ends when it is not its own fault, and what a person sees of it."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest

from trainer.commands.console import print_report
from trainer.commands.exit_codes import exit_codes
from trainer.errors import PreemptedError
from trainer.report.results import Observation, Report

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a")
ENDS = {
    "full disk": (FULL, 2, "error: 'runs/a': No space left on device.\n"),
    "closed pipe": (BrokenPipeError(), 141, ""),
    "kept": (PreemptedError("Stopped."), 85, "Stopped. The same command goes on from there."),
    "lost": (PreemptedError("Stopped.", False), 143, "Stopped. The same command begins anew."),
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_is_no_mistake_of_the_program_has_no_traceback(kind, capsys):
    error, code, said = ENDS[kind]
    with pytest.raises(SystemExit) as stop, exit_codes():
        raise error
    assert stop.value.code == code
    assert said in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_gets_another(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with exit_codes():
        print("8×")
    assert stream.buffer.getvalue() == b"8?\n"


def test_a_mistake_of_the_program_has_its_traceback():
    with pytest.raises(OSError, match="of its own"), exit_codes():
        raise OSError("of its own")


def test_a_claim_that_is_not_shown_says_why(capsys):
    claims = [
        Observation("A", "a paper", True, "50% against 10%."),
        Observation("B", "a paper", False, "10% [of all] against 50%."),
        Observation("C", "a paper", None, "Nothing was measured."),
    ]
    report = Report("a", 64, (), {}, {}, (), {}, {}, observations=tuple(claims))
    print_report(report, "runs/x", existing=False)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()[-6:-1]] == [
        "shown: A (a paper)",
        "not shown: B (a paper)",
        "    10% [of all] against 50%.",
        "not judged: C (a paper)",
        "    Nothing was measured.",
    ]


def test_names_in_a_report_are_no_markup(capsys):
    claim = Observation("[ours] beats [/bold]", "a [paper]", True, "")
    report = Report("a", 64, (), {}, {}, (), {}, {}, observations=(claim,))
    print_report(report, "runs/[b]", existing=False)
    said = capsys.readouterr().out
    assert "shown: [ours] beats [/bold] (a [paper])" in said
    assert "runs/[b]/report.html" in said
