"""What a reader has to know of a run before believing its numbers."""

from io import StringIO

import pytest
from rich.console import Console

from tests.report.examples import report
from trainer.commands import console
from trainer.report.health import troubles
from trainer.report.html import write_html
from trainer.report.results import Arm


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"skipped": 9}, ["RoPE: 9 of 1,000 updates were left out"]),
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
