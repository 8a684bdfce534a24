"""A terminal obeys no text of models or strangers."""

from __future__ import annotations

import sys

import pytest

from trainer.commands.shown import show

RAW = "a\x1b[2J\tb\n\x7f\x9b\xa0"


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "a\u241b[2J\tb\n\u2421\ufffd\xa0"), (False, RAW)]
)
def test_what_a_terminal_would_obey_is_shown_and_passed_on_to_files(
    monkeypatch, capsys, terminal, shown
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show(RAW)
    show(RAW, end="")
    assert capsys.readouterr().out == f"{shown}\n{shown}"
