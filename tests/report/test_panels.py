"""Lines of many models and methods, as whole figures."""

from __future__ import annotations

import pytest

from tests.report.described import check
from tests.report.examples import cell, report
from trainer.evaluation.outcomes import Outcomes
from trainer.plotting.lines import Frame, Panel, Series, paper_style, side_by_side
from trainer.report.figures import apart, draw_rows


def plain(axes):
    axes.set_xlim(0, 10)


FRAME = Frame("step", "loss", plain, (4, "here"), ((0.5, "chance"),))


def rows_of(models, methods):
    """The outcomes of all of them, and a level line for each."""
    outcomes = Outcomes(report(*(cell([1.0], m, k) for m in models for k in methods)))
    lines = {
        row: Series("", 0, [1, 2], [n, n], marked=n > 0) for n, row in enumerate(outcomes.rows)
    }
    return outcomes, lines


def test_up_to_eight_lines_share_a_panel():
    outcomes, lines = rows_of(("DroPE", "RoPE"), ("none", "pi"))
    with paper_style():
        check(
            draw_rows(outcomes, lines, FRAME),
            """
            panel 1,1 of 1x1
              x linear 'step'
              y linear 'loss'
              line: x 1 2; y 0 0
              line: x 1 2; y 1 1
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: level at 0.5
              line: upright at 4
              note 'here': 4 1
            legend 'RoPE + PI', 'RoPE', 'DroPE + PI', 'DroPE', 'chance'
            """,
        )


def test_more_lines_have_a_panel_for_each_model():
    """A method looks in all of them as with the first model that has it."""
    models = ("RoPE", "HoPE", "Mine", "Fourth", "Fifth")
    outcomes, lines = rows_of((*models, "without lines"), ("none", "yarn"))
    del lines["RoPE", "yarn"], lines["without lines", "none"], lines["without lines", "yarn"]
    with paper_style():
        figure = draw_rows(outcomes, lines, FRAME)
        assert [axes.get_title() for axes in figure.axes] == [*models]
        for axes in figure.axes[2:]:
            axes.remove()
        check(
            figure,
            """
            panel 1,1 of 2x3 'RoPE'
              x linear
              y linear
              line: x 1 2; y 0 0
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: x 1 2; y 4 4
              line: x 1 2; y 5 5
              line: x 1 2; y 6 6
              line: x 1 2; y 7 7
              line: x 1 2; y 8 8
              line: x 1 2; y 9 9
              line: x 1 2; y 0 0
              line: level at 0.5
              line: upright at 4
            panel 1,2 of 2x3 'HoPE'
              x linear
              y linear
              line: x 1 2; y 0 0
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: x 1 2; y 4 4
              line: x 1 2; y 5 5
              line: x 1 2; y 6 6
              line: x 1 2; y 7 7
              line: x 1 2; y 8 8
              line: x 1 2; y 9 9
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: level at 0.5
              line: upright at 4
            below 'step'
            left 'loss'
            legend 'as is', 'YaRN', 'chance', 'here'
            """,
        )


def test_more_methods_than_models_have_a_panel_for_each_method():
    methods = ("none", "pi", "ntk", "yarn", "longrope", "dope")
    outcomes, lines = rows_of(("RoPE", "Mine"), methods)
    del lines["RoPE", "none"], lines["RoPE", "dope"], lines["Mine", "dope"]
    with paper_style():
        figure = draw_rows(outcomes, lines, FRAME)
        assert [axes.get_title() for axes in figure.axes] == [
            *("as is", "PI", "NTK-aware", "YaRN", "LongRoPE"),
        ]
        for axes in figure.axes[2:]:
            axes.remove()
        check(
            figure,
            """
            panel 1,1 of 2x3 'as is'
              x linear
              y linear
              line: x 1 2; y 6 6
              line: x 1 2; y 1 1
              line: x 1 2; y 7 7
              line: x 1 2; y 2 2
              line: x 1 2; y 8 8
              line: x 1 2; y 3 3
              line: x 1 2; y 9 9
              line: x 1 2; y 4 4
              line: x 1 2; y 10 10
              line: x 1 2; y 6 6
              line: level at 0.5
              line: upright at 4
            panel 1,2 of 2x3 'PI'
              x linear
              y linear
              line: x 1 2; y 6 6
              line: x 1 2; y 1 1
              line: x 1 2; y 7 7
              line: x 1 2; y 2 2
              line: x 1 2; y 8 8
              line: x 1 2; y 3 3
              line: x 1 2; y 9 9
              line: x 1 2; y 4 4
              line: x 1 2; y 10 10
              line: x 1 2; y 1 1
              line: x 1 2; y 7 7
              line: level at 0.5
              line: upright at 4
            below 'step'
            left 'loss'
            legend 'RoPE', 'Mine', 'chance', 'here'
            """,
        )


def test_panels_side_by_side_share_one_legend():
    one = Series("one", 0, [1, 2], [0, 1], low=[0, 0.5], high=[0.5, 1])
    two = Series("two", 1, [1, 2], [1, 1], low=[0, 0.5], high=[1, 1])
    three = Series("three", 2, [1, 2], [3, 3])
    right = Frame("other", "success", plain, None, ((0.25, "only here"),))
    with paper_style():
        check(
            side_by_side(
                [Panel("", [one, two], FRAME), Panel("", [two, three], right)],
                x_label="step",
                balanced=True,
            ),
            """
            panel 1,1 of 1x2
              x linear
              y linear 'loss'
              line: x 1 2; y 0 1
              line: x 1 2; y 1 1
              line: level at 0.5
              line: upright at 4
              bars: 1 0, 1 0.5; 2 0.5, 2 1
              bars: 1 0, 1 1; 2 0.5, 2 1
            panel 1,2 of 1x2
              x linear
              y linear 'success'
              line: x 1 2; y 1 1
              line: x 1 2; y 3 3
              line: level at 0.25
              bars: 1 0, 1 1; 2 0.5, 2 1
            below 'step'
            legend 'one', 'two', 'three', 'chance', 'here', 'only here'
            """,
        )


def test_lines_with_intervals_stand_apart_by_three_hundredths_of_an_octave():
    lines = [Series(str(n), n, [64, 128], [1, 1], [0, 0], [2, 2]) for n in range(3)]
    lines.append(Series("none", 0, [64], [1]))
    first, second, third, last = apart(lines)
    for line, octaves in ((first, -0.045), (second, -0.015), (third, 0.015), (last, 0)):
        assert line.x == pytest.approx([x * 2**octaves for x in (64, 128)[: len(line.x)]])
    assert first.y == lines[0].y
