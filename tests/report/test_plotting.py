"""Figures show names as they stand."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.report.described import check
from trainer.plotting.lines import (
    Frame,
    Panel,
    Series,
    draw,
    legend_above,
    line_handle,
    log_axis,
    side_by_side,
    training_length_mark,
)
from trainer.plotting.style import blank, paper_style, save
from trainer.report.figures import perplexity_axis

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
        panels = [Panel(title, lines, frame) for title in "ab"]
        figure = side_by_side(panels, balanced=True)
        figure.canvas.draw()
        (legend,) = figure.legends
        drawn = legend.get_window_extent()
        texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:6] == names
    assert drawn.x0 >= figure.bbox.x0
    assert drawn.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("values", "scale", "limits", "ticks"),
    [
        # A margin of 6% of what they span.
        ((10.0, 12.0), "linear", (9.88, 12.12), None),
        ((10.0, 10.0), "linear", (9.0, 11.0), None),
        ((10.0, math.nan, 400.0), "log", (10 / 1.2, 480), [10, 20, 50, 100, 200]),
        ((10.0, 20_000.0), "log", (10 / 1.2, 24_000), [10, 100, 1000, 10_000]),
        ((), "linear", (0.9, 1.1), None),
    ],
)
def test_the_axis_of_perplexities_holds_them_all(values, scale, limits, ticks):
    axes = Figure().subplots()
    perplexity_axis(values)(axes)
    assert axes.get_yscale() == scale
    assert axes.get_ylim() == pytest.approx(limits)
    if ticks is None:  # matplotlib's own
        return
    low, high = axes.get_ylim()
    assert [y for y in axes.get_yticks() if low <= y <= high] == pytest.approx(ticks)


def plain(axes):
    axes.set_xlim(0, 10)


def test_few_lines_share_a_panel_and_are_named_in_the_order_of_their_right_ends():
    """What ends with nothing measured is named by what was measured last, or at the end."""
    lines = [
        Series("low", 0, [1, 2], [3, 1]),
        Series("high", 1, [1, 2], [2, 4], low=[1, 3], high=[2.5, 6], marked=False),
        Series("ends early", 7, [1, 2], [2, math.nan], raw=[1, 3], opacity=0.5),
        Series("nothing", 9, [1, 2], [math.nan, math.nan]),
        Series("half", 2, [1, 2], [1, 1.5], low=[0, 0]),
    ]
    frame = Frame("step", "loss", plain, (4, "here\nor there"), ((0.5, "chance"), (3, "best")))
    with paper_style():
        figure = draw(lines, frame)
        assert figure.axes[0].get_axisbelow()
        check(
            figure,
            """
            panel 1,1 of 1x1
              x linear 'step'
              y linear 'loss'
              line: x 1 2; y 3 1
              line: x 1 2; y 2 4
              line: x 1 2; y 1 3
              line: x 1 2; y 2 nan
              line: x 1 2; y nan nan
              line: x 1 2; y 1 1.5
              line: level at 0.5
              line: level at 3
              line: upright at 4
              note 'here\\nor there': 4 1
              bars: 1 1, 1 2.5; 2 3, 2 6
            legend 'high', 'ends early', 'half', 'low', 'nothing', 'chance', 'best'
            """,
        )


def test_many_lines_have_panels_of_their_own_over_the_others():
    lines = [Series(str(n), n, [1, 2], [n, n], marked=n > 6) for n in range(9)]
    frame = Frame("step", "loss", plain, (4, "here"), ((0.5, "chance"),))
    with paper_style():
        figure = draw(lines, frame)
        titles = [(axes.get_title(), axes.title.get_color()) for axes in figure.axes]
        for axes in figure.axes[2:]:
            axes.remove()
        check(
            figure,
            """
            panel 1,1 of 3x3 '0'
              x linear
              y linear
              line: x 1 2; y 0 0
              line: x 1 2; y 1 1
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: x 1 2; y 4 4
              line: x 1 2; y 5 5
              line: x 1 2; y 6 6
              line: x 1 2; y 7 7
              line: x 1 2; y 8 8
              line: x 1 2; y 0 0
              line: level at 0.5
              line: upright at 4
            panel 1,2 of 3x3 '1'
              x linear
              y linear
              line: x 1 2; y 0 0
              line: x 1 2; y 1 1
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: x 1 2; y 4 4
              line: x 1 2; y 5 5
              line: x 1 2; y 6 6
              line: x 1 2; y 7 7
              line: x 1 2; y 8 8
              line: x 1 2; y 1 1
              line: level at 0.5
              line: upright at 4
            below 'step'
            left 'loss'
            legend 'chance', 'here'
            """,
        )
    assert [title for title, _ in titles] == [str(n) for n in range(9)]
    assert [colour for _, colour in titles[5:8]] == ["#E69F00", "#CC79A7", "#000000"]


@pytest.mark.parametrize(
    ("lines", "shape", "labelled"),
    [
        (9, (3, 3), [7, 8, 9]),
        (10, (3, 4), [7, 8, 9, 10]),  # as many places are empty as with three columns
        (11, (3, 4), [8, 9, 10, 11]),
        (13, (5, 3), [11, 12, 13]),
    ],
)
def test_the_last_row_of_panels_is_as_full_as_can_be(lines, shape, labelled):
    """And the last panel of every column has the labels of its ticks."""
    figure = draw([Series(str(n), n, [1], [1]) for n in range(lines)], Frame("x", "y", plain))
    assert len(figure.axes) == lines
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == shape
    with_labels = [
        number
        for number, axes in enumerate(figure.axes, 1)
        if axes.xaxis.get_tick_params()["labelbottom"]
    ]
    assert with_labels == labelled


def test_looks_differ_in_colour_and_mark_then_in_dashes_too():
    """Seven colours, ten marks, three dashes."""
    figure = blank(1)
    numbers = (0, 1, 6, 7, 9, 10, 13, 14, 20, 21)
    legend_above(figure, [line_handle(Series(str(n), n, [], [])) for n in numbers], columns=2)
    check(
        figure,
        """
        legend '0', '1', '6', '7', '9', '10', '13', '14', '20', '21'
        """,
    )


@pytest.mark.parametrize(
    ("x", "aligned"), [(3.2, "left"), (3.4, "center"), (6.6, "center"), (6.8, "right")]
)
def test_a_note_grows_towards_the_wider_side(x, aligned):
    (axes,) = draw([], Frame("x", "y", plain, (x, "note"))).axes
    (note,) = axes.texts
    assert note.get_horizontalalignment() == aligned
    assert note.xycoords == axes.get_xaxis_transform()


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 50, [1, 2, 5, 10, 20, 50]),
        (1, 1000, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (1, 2000, [1, 10, 100, 1000]),
    ],
)
def test_a_logarithmic_axis_of_more_than_three_decades_has_powers_of_ten_alone(low, high, ticks):
    axes = Figure().subplots()
    axes.set_ylim(low, high)
    log_axis(axes, low, high)
    assert [place for place in axes.get_yticks() if low <= place <= high] == ticks
    assert axes.yaxis.get_major_formatter()(2000, 0) == "2000"
    assert len(axes.get_yticks(minor=True)) == 0


@pytest.mark.parametrize(
    ("length", "drawn", "marked"),
    [
        (64, (64, 128), True),
        (64, (32, 64), True),
        (64, (65, 128), False),
        (64, (16, 63), False),
        (None, (16, 63), False),
    ],
)
def test_the_training_length_is_marked_within_what_is_drawn(length, drawn, marked):
    wanted = (64.0, "training length") if marked else None
    assert training_length_mark(length, drawn) == wanted


def test_a_legend_too_wide_for_its_figure_is_set_in_fewer_columns():
    for words, columns in (("a", 3), ("a long name " * 2, 2), ("a long name " * 12, 1)):
        figure = blank(1)
        legend_above(figure, [line_handle(Series(words, n, [], [])) for n in range(3)])
        (legend,) = figure.legends
        assert legend._ncols == columns
    empty = blank(1)
    legend_above(empty, [])
    assert empty.legends == []
