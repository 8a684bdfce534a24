"""Heat maps and their scales."""

import math

import numpy as np
import pytest

from tests.report.described import check
from trainer.plotting.maps import Scale, heat_maps

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
    norm = scale.norm(list(map(np.array, values)))
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
        panel 1,1 of 2x2 'one'
          x linear
          y linear
          image 0..9, from -1 5 6 -2: 1 2 3 / 4 nan 6
        panel 1,2 of 2x2 'two'
          x linear
          y linear
          image 0..9, from -1 1 2 -2: 0
        panel 2,1 of 2x2 'three'
          x linear
          y linear
          image 0..9, from -1 1 2 -2: 9
        bar 'entropy' 0..9
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
        panel 1,1 of 2x1 'one'
          x linear
          y linear
          image LogNorm 1.001..2, from -0.5 1.5 0.5 -0.5: 1 2
        panel 2,1 of 2x1 'two'
          x linear
          y linear
          image -4..4, from -0.5 1.5 0.5 -0.5: -3 3
        bar 'a' LogNorm 1.001..2
        bar 'b' -4..4
        below 'x'
        left 'y'
        """,
    )
