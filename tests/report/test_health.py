"""What a reader has to know of a run before believing its numbers."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.report.examples import report
from trainer.commands import console
from trainer.evaluation.results import Arm, Change, Drop, troubles
from trainer.report.pages import write_html


def test_what_was_changed_in_training_stands_there_too(tmp_path, monkeypatch):
    """Of the run itself the drop has a line of its own."""
    long = Change(1000, "phase 'long'", 4096, 4.25, 4.5, 3.125)
    main = Arm("RoPE", "rope", 10, 2000, 64_000, changes=(Change(500, "dropped", 64, 3, 5), long))
    other = Arm("NoPE", "nope", 10, 2000, 64_000, changes=(replace(long, loss_end=None),))
    whole = replace(report(arms=(main, other)), drop=Drop(500, 3.0, 5.0))
    shown = StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=shown, width=200))
    console.print_report(whole, "runs/x", existing=False)
    after = "after step 1000: phase 'long'; held-out loss at 4,096 tokens 4.250 before, then 4.500"
    said = " ".join(shown.getvalue().split())
    assert f"RoPE, {after} to 3.125. NoPE, {after} to ?." in said
    assert said.count("just after") == 1
    write_html(whole, [], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index('id="changes"') :])
    assert cells[6:12] == [
        "1\u202f000",
        "phase &#39;long&#39;",
        "4\u202f096",
        "4.250",
        "4.500",
        "3.125",
    ]
    assert cells[17] == "·"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"skipped": 9}, ["RoPE: 9 of 1,000 updates were left out"]),
        ({"curve": ((990, 2.0), (1000, 2.0))}, []),
        (
            {"curve": ((980, 2.0), (990, 2.0))},
            ["RoPE: its metrics.csv ends at step 990 of 1,000, and with it its curve of the loss"],
        ),
        ({"rewinds": 2}, ["RoPE: it diverged and went back to a checkpoint 2 times"]),
        (
            {"rewinds": 1, "finite": False},
            ["RoPE: it diverged and went", "RoPE: the norm of its weights is"],
        ),
    ],
)
def test_what_went_wrong_in_training_stands_in_the_terminal_and_on_the_page(
    fields, said, tmp_path, monkeypatch
):
    arm = Arm("RoPE", "rope", 10, 1000, 64_000, **fields)
    assert [
        trouble[: len(start)] for trouble, start in zip(troubles([arm]), said, strict=True)
    ] == (said)
    shown = StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=shown, width=100))
    console.print_report(report(arms=(arm,)), "runs/x", existing=False)
    write_html(report(arms=(arm,)), [], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        shown.getvalue().count("Warning: RoPE: ") == page.count("Warning.</b> RoPE: ") == len(said)
    )
