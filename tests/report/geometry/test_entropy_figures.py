"""Maps and curves, as wholes."""

import math

import numpy as np
import pytest

from tests.report.described import check
from trainer.plotting.heat_maps import Scale, by_position, curves, heat_maps

NAN = math.nan


@pytest.mark.parametrize(
    ("scale", "values", "limits"),
    [
        (Scale("l"), ([1.0, 2.0], [5.0, NAN]), (1, 5)),
        (Scale("l", low=0), ([1.0, 2.0],), (0, 2)),
        (Scale("l", high=9), ([1.0, 2.0],), (1, 9)),
        (Scale("l"), ([NAN],), (0, 1)),
        (Scale("l", log=True), ([0.0, 2.0, 2.0],), (2, 2.002)),
        (Scale("l", log=True), ([-1.0, math.inf],), (0.1, 1)),
        (Scale("l", low=3, high=7, log=True), ([2.0, 9.0],), (3, 7)),
        # A thousandth lies below the darkest colour.
        (Scale("l", log=True), (np.geomspace(1, 10, 1001),), (10**0.001, 10)),
    ],
)
def test_a_scale_holds_what_is_known_of_all_panels(scale, values, limits):
    norm = scale.norm([np.array(one) for one in values])
    assert (norm.vmin, norm.vmax) == pytest.approx(limits)
    assert ("Log" in type(norm).__name__) == scale.log


def test_maps_of_one_scale_share_a_bar():
    """A cell is two units wide and four high, and in the middle of its place."""
    panels = {
        "one": np.array([[1.0, 2.0, 3.0], [4.0, NAN, 6.0]]),
        "two": np.array([[0.0]]),
        "three": np.array([[9.0]]),
    }
    figure = heat_maps(panels, Scale("entropy"), x="key", y="query", cell=(2, 4))
    check(
        figure,
        """
            6.75 x 4.30 inches
            panel 1,1 of 2x2 'one'
              x linear -1..5 ticks -1 0 1 2 3 4 5
              y linear 6..-2 ticks -2 0 2 4 6
              image cividis 0..9, nearest, else 0.5 0.5 0.5 0.22, from -1 5 6 -2: 1 2 3 / 4 nan
                  6 as a picture
            panel 1,2 of 2x2 'two'
              x linear -1..1 ticks -1 0 1
              y linear 2..-2 ticks -2 -1 0 1 2
              image cividis 0..9, nearest, else 0.5 0.5 0.5 0.22, from -1 1 2 -2: 0 as a picture
            panel 2,1 of 2x2 'three'
              x linear -1..1 ticks -1 0 1
              y linear 2..-2 ticks -2 -1 0 1 2
              image cividis 0..9, nearest, else 0.5 0.5 0.5 0.22, from -1 1 2 -2: 9 as a picture
            bar 'entropy' cividis 0..9 ticks 0 1 2 3 4 5 6 7 8 9 beside 1 2 3
            below 'key'
            left 'query'
            """,
    )


def test_maps_of_own_scales_have_bars_of_their_own():
    panels = {"one": np.array([[1.0, 2.0]]), "two": np.array([[-3.0, 3.0]])}
    scales = Scale("a", log=True), Scale("b", low=-4, high=4, signed=True)
    check(
        heat_maps(panels, scales, x="x", y="y", columns=1, height=1.5),
        """
            6.75 x 3.30 inches
            panel 1,1 of 2x1 'one'
              x linear -0.5..1.5 ticks 0 1
              y linear 0.5..-0.5 ticks -0.4 -0.2 0 0.2 0.4
              image cividis LogNorm 1.001..2, nearest, else 0.5 0.5 0.5 0.22, from -0.5 1.5 0.5
                  -0.5: 1 2 as a picture
            panel 2,1 of 2x1 'two'
              x linear -0.5..1.5 ticks 0 1
              y linear 0.5..-0.5 ticks -0.4 -0.2 0 0.2 0.4
              image RdBu_r -4..4, nearest, else 0.5 0.5 0.5 0.22, from -0.5 1.5 0.5 -0.5: -3 3
                  as a picture
            bar 'a' cividis LogNorm 1.001..2 ticks  beside 1
            bar 'b' RdBu_r -4..4 ticks -4 -2 0 2 4 beside 2
            below 'x'
            left 'y'
            """,
    )


def test_curves_over_whole_numbers_and_others():
    lines = {"one": ([1, 2], [0.5, 5.0]), "two": ([1, 2], [1.0, 1.0])}
    check(
        curves(lines, x="layer", y="rank", log_y=True, marked=False),
        """
        6.75 x 3.10 inches
        panel 1,1 of 1x1
          x linear 0.95..2.05 'layer' ticks 1 2
          y log 0.4456..5.61 'rank' ticks 1='10^{0}' and between grid
          line #000000 -: x 1 2; y 0.5 5
          line #0072b2 -: x 1 2; y 1 1
        legend right, center right, columns: 1
          'one' #000000 -
          'two' #0072b2 -
        """,
    )
    (axes,) = curves({"one": ([1, 1.5], [0.5, 5.0])}, x="x", y="y", vertical=(1.25, "here")).axes
    assert axes.get_yscale() == "linear"
    assert [line.get_marker() for line in axes.lines] == ["o", "None"]
    assert 1.2 in axes.get_xticks().round(6)  # no whole number
    assert [text.get_text() for text in axes.texts] == ["here"]


def test_values_by_position_with_a_span():
    panels = {"a": [1.0, 2.0], "b": [0.0, 4.0], "c": [3.0, 3.0]}
    check(
        by_position(panels, [0, 64], marked=(10, 20), x="token", y="share"),
        """
        6.75 x 3.70 inches
        panel 1,1 of 2x2 'a'
          x linear -3.2..67.2 ticks 0 20 40 60 unlabelled
          y linear 0..2.05 ticks 0 1 2 grid
          span #d55e00: 10, 10 wide
          line #d55e00 --: upright at 15
          line #1f77b4 -: x 0 64; y 1 2 as a picture
        panel 1,2 of 2x2 'b'
          x linear -3.2..67.2 ticks 0 20 40 60 unlabelled
          y linear 0..4.2 ticks 0 2 4 grid
          span #d55e00: 10, 10 wide
          line #d55e00 --: upright at 15
          line #1f77b4 -: x 0 64; y 0 4 as a picture
        panel 2,1 of 2x2 'c'
          x linear -3.2..67.2 ticks 0 20 40 60
          y linear 0..3.165 ticks 0 1 2 3 grid
          span #d55e00: 10, 10 wide
          line #d55e00 --: upright at 15
          line #1f77b4 -: x 0 64; y 3 3 as a picture
        below 'token'
        left 'share'
        """,
    )
