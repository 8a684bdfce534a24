"""Figures show names as they stand."""

from __future__ import annotations

from matplotlib.text import Text

from trainer.report.plotting import Frame, Series, draw, paper_style, save

NAME = r"costs $\frac$ or \$5"
"""As a formula it has no meaning, and matplotlib would refuse it."""


def test_dollars_in_a_name_begin_no_formula(tmp_path):
    with paper_style():
        frame = Frame("x", "y", lambda axes: axes.set_xscale("log"))
        figure = draw([Series(NAME, 0, (1, 10), (1, 2)), Series("b", 1, (1, 10), (2, 1))], frame)
        save(figure, tmp_path / "figure")
        shown = [text.get_text() for text in figure.findobj(Text)]
    assert r"costs \$\frac\$ or \$5" in shown
    assert (tmp_path / "figure.svg").is_file()
