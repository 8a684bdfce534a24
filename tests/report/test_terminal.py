"""What the program prints of a run, as a whole, and where its log goes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from tests.report.examples import cell, report
from trainer.report import terminal as console
from trainer.report.report import Observation, RunSummary
from trainer.report.tables import tables

WHOLE = replace(
    report(runs=(RunSummary("RoPE", "rope", 10, 2000, 64_000, skipped=9),)),
    notes=("One [of two] was left out.",),
    observations=(
        Observation("[A] wins", "a [paper]", True, "50% against 10%."),
        Observation("B wins", "a paper", False, "10% [of all] against 50%."),
        Observation("C wins", "a paper", None, "Nothing was measured."),
    ),
)


@pytest.fixture
def terminal(monkeypatch):
    """A function that puts a terminal of some width, or a file, where tables go; what is said."""
    shown = StringIO()

    def make(width, is_terminal=True):
        look = {"width": width, "force_terminal": is_terminal, "color_system": None}
        monkeypatch.setattr(console, "Console", partial(Console, file=shown, **look))
        return shown

    return make


def test_a_run_is_told_of_in_the_order_of_its_life(terminal):
    shown = terminal(200)
    console.print_report(WHOLE, "runs/[x]")
    expected = """
        Warning: RoPE: 9 of 2,000 updates were left out, because their loss or gradient was
        not finite.
        shown      [A] wins
        not shown  B wins
        not judged C wins
                   Nothing was measured.
        Note: One [of two] was left out.
        Report: runs/[x]/report.html
        """
    assert shown.getvalue().split() == expected.split()


def test_a_reason_that_claims_share_is_printed_once(terminal):
    shown = terminal(200)
    observations = tuple(
        Observation(claim, "a paper", None, why)
        for claim, why in (("A wins", "No text."), ("B wins", "No text."), ("C wins", "No task."))
    )
    console.print_report(replace(WHOLE, observations=observations), "runs/x")
    assert shown.getvalue().count("No text.") == 1
    assert shown.getvalue().count("No task.") == 1


def test_a_table_has_a_line_of_values_and_one_of_intervals(terminal):
    shown = terminal(80)
    better = cell([1.0] * 9 + [0.0] * 11, method="yarn")
    console.print_tables(
        tables(report(cell([0.0] * 20), better, cell([1.0] * 5, "DroPE", length=1024)))
    )
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines[4:10] == [
        "RoPE · 0.0", "0.0–16.1", "+ YaRN · 45.0↑", "25.8–65.8", "", "DroPE 100.0 ·",
    ]  # fmt: skip


def test_seeds_are_told_of_by_their_mean(terminal):
    shown, seeds = terminal(200), {"A (0)": "A", "A (1)": "A"}
    console.print_report(report(*(cell([1.0], name) for name in seeds), seeds=seeds), "runs/x")
    lines = shown.getvalue().splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("A")] == [["A", "100.0"]]
    assert "(0)" not in shown.getvalue()


@pytest.mark.parametrize(
    ("width", "is_terminal", "most"), [(60, True, 60), (60, False, 100), (200, True, 100)]
)
def test_text_is_as_wide_as_a_terminal_and_no_wider_than_100(terminal, width, is_terminal, most):
    shown = terminal(width, is_terminal)
    console.print_report(replace(WHOLE, notes=("a " * 100,)), "x")
    assert most - 4 < max(map(len, shown.getvalue().splitlines())) <= most
