"""Panels beside each other, as wholes."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.report.described import check
from trainer.plotting.lines import (
    Frame,
    Panel,
    Series,
    log_if_wide,
    side_by_side,
    unscaled,
    whole_x,
)
from trainer.plotting.points import HeadCloud, head_points


def test_a_line_and_a_reference_are_named_once_for_all_panels():
    frame = Frame("x", "y", unscaled, (2, "here\nor so"), ((0.5, "chance"), (0.75, "better")))
    one, other = Series("one", 0, [1, 2, 3], [0, 1, 0]), Series("other", 8, [1, 3], [1, 1])
    panels = [Panel("a", [one], frame), Panel("b", [other, one], Frame("u", "v", unscaled))]
    check(
        side_by_side(panels),
        """
        panel 1,1 of 1x2 'a'
          x linear 'x'
          y linear 'y'
          line: x 1 2 3; y 0 1 0
          line: level at 0.5
          line: level at 0.75
          line: upright at 2
        panel 1,2 of 1x2 'b'
          x linear 'u'
          y linear 'v'
          line: x 1 3; y 1 1
          line: x 1 2 3; y 0 1 0
        legend 'one', 'other', 'chance', 'better', 'here: or so'
        """,
    )


@pytest.mark.parametrize(
    ("values", "scale"), [((2, 10), "linear"), ((2, 10.1), "log"), ((0, 10), "linear")]
)
def test_what_spans_more_than_a_factor_of_five_is_logarithmic(values, scale):
    axes = Figure().subplots()
    axes.plot([0, 2], values)
    whole_x(log_if_wide)(axes)
    assert axes.get_yscale() == scale
    assert [place % 1 for place in axes.get_xticks()] == [0] * len(axes.get_xticks())


def test_points_of_heads_have_the_colour_of_their_layer():
    clouds = [
        HeadCloud.of_layers(
            "kept", np.array([[0.0, 1], [2, 3]]), np.array([[1.0, 1], [4, -1]]), "x", "y", True
        ),
        HeadCloud.of_layers("lost", np.array([[0.0, 1], [2, 4]]), np.ones((2, 2)), "u", "v"),
    ]
    check(
        head_points(clouds, 2),
        """
        panel 1,1 of 1x2 'kept'
          x linear 'x'
          y linear 'y'
          line: x -1 4; y -1 4
          points 0..1 of 0 0 1 1: x 0 1 2 3; y 1 1 4 -1
        panel 1,2 of 1x2 'lost'
          x linear 'u'
          y linear 'v'
          points 0..1 of 0 0 1 1: x 0 1 2 4; y 1 1 1 1
        bar 'layer' 0..1
        """,
    )


def test_some_heads_of_a_model_of_one_layer_are_one_narrow_panel():
    cloud = HeadCloud("t", np.array([0, 0]), np.array([1.0, 2]), np.array([3.0, 4]), "x", "y")
    check(
        head_points([cloud], 1),
        """
        panel 1,1 of 1x1 't'
          x linear 'x'
          y linear 'y'
          points 0..1 of 0 0: x 1 2; y 3 4
        bar 'layer' 0..1
        """,
    )
