"""Figures show names as they stand."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from trainer.report.frames import perplexity_axis
from trainer.report.panels import pair
from trainer.report.plotting import Frame, Series, draw, paper_style
from trainer.report.saving import save

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


def test_a_legend_above_panels_is_no_wider_than_the_figure():
    frame = Frame(
        *("x", "y", lambda axes: axes.set_xscale("log")),
        vertical=(2, "training length"),
        horizontal=((0, "chance (1.1%)"), (1, "any listed value (25.0%)")),
    )
    names = ["RoPE", "DroPE", "NoPE from scratch", "RoPE-ID", "HalfRoPE", "High-frequency RoPE"]
    with paper_style():
        lines = [Series(name, n, (1, 10), (1, n)) for n, name in enumerate(names)]
        figure = pair([lines, lines], [frame, frame])
        figure.canvas.draw()
        (legend,) = figure.legends
        drawn = legend.get_window_extent()
        texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:6] == names
    assert drawn.x0 >= figure.bbox.x0
    assert drawn.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("values", "scale", "limits"),
    [
        ((10.0, 12.0), "linear", (9.88, 12.12)),  # a margin of 6% of what they span
        ((10.0, 10.0), "linear", (9.0, 11.0)),
        ((10.0, math.nan, 1200.0), "log", (10 / 1.2, 1440)),
        ((), "linear", (0.9, 1.1)),
    ],
)
def test_the_axis_of_perplexities_holds_them_all(values, scale, limits):
    axes = Figure().subplots()
    perplexity_axis(values)(axes)
    assert axes.get_yscale() == scale
    assert axes.get_ylim() == pytest.approx(limits)
