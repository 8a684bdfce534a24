"""Figures of rotary offset features, as wholes."""

import math

import numpy as np

from tests.report.described import check, described
from trainer.analysis.studies.offset_figures import (
    Method,
    Radii,
    extended_bounds,
    radius_and_angle,
    radius_and_variance,
)


def test_pairs_by_their_index_and_by_their_turns():
    """The largest radius is drawn last, the slowest pairs stand right."""
    found = Radii(
        pair=np.array([0, 1, 2]),
        turns=np.array([8.0, 2.0, 0.5]),
        radius=np.array([1.0, 4.0, 2.0]),
        angle=np.array([0.0, math.pi, 5.0]),
    )
    lower = np.array([2, 3]), np.array([1.5 * math.pi, 4.0])
    check(
        radius_and_angle(found, (0.5, 1.5), (2,), lower),
        """
        panel 1,1 of 2x2
          x linear
          y linear 'radius of the mean key'
          points #0072b2: x 0 2 1; y 1 2 4 as a picture
          line #707070 :: level at 0.5
          line #707070 :: level at 1.5
          line #000000 --: upright at 1.5
        panel 1,2 of 2x2
          x log
          y linear
          points #0072b2: x 8 0.5 2; y 1 2 4 as a picture
          line #707070 :: level at 0.5
          line #707070 :: level at 1.5
          line 'upper bound 2π/C' #000000 --: upright at 1
        panel 2,1 of 2x2
          x linear 'pair index, from the fastest on'
          y linear 'angle φ, query to key (rad)'
          points #b0dd2f-#440154 1..4 of 1 2 4: x 0 2 1; y 0 5 3.142; sizes 9.25 15.5 28 as
              a picture
          points #d55e00: x 2 3; y 4.712 4
          line #000000 --: upright at 1.5
        panel 2,2 of 2x2
          x log 'turns within the context, θC/2π (logarithmic)'
          y linear
          points #b0dd2f-#440154 1..4 of 1 2 4: x 8 0.5 2; y 0 5 3.142; sizes 9.25 15.5 28
              as a picture
          line 'lower bound π + θC/2' #d55e00 -: x 200 from 0.5 to 1; y 200 from 4.712 to
              6.283
          line 'upper bound 2π/C' #000000 --: upright at 1
        bar 'radius of the mean key' #b0dd2f-#440154 1..4
        legend
          'lower bound π + θC/2' #d55e00 -
          'upper bound 2π/C' #000000 --
        """,
    )


def test_the_lower_bound_begins_at_half_a_turn_or_at_the_slowest_pair():
    for turns, least in (([2.0, 4.0], 0.5), ([0.125, 2.0], 0.125)):
        some = np.zeros(2)
        found = Radii(np.arange(2), np.array(turns), some, some)
        axes = radius_and_angle(found, (), (), (np.array([]), np.array([]))).axes[3]
        (bound,) = (line for line in axes.lines if str(line.get_label()).startswith("lower"))
        assert bound.get_xdata()[0] == least
        assert bound.get_ydata()[0] == math.pi * (1 + least)
        assert bound.get_ydata()[-1] == 2 * math.pi


def test_variance_by_radius_of_queries_and_keys():
    of_keys = np.array([True, False, True])
    figure = radius_and_variance(np.array([1.0, 2, 3]), np.array([0.1, 0.2, 0.3]), of_keys)
    check(
        figure,
        """
        panel 1,1 of 1x2
          x linear 'radius of the mean, queries'
          y linear 'circular variance of the angle'
          points #0072b2: x 2; y 0.2 as a picture
        panel 1,2 of 1x2
          x linear 'radius of the mean, keys'
          y linear
          points #d55e00: x 1 3; y 0.1 0.3 as a picture
        """,
    )


def test_bounds_of_extensions():
    """Turns of every pair that moves, lower bounds of those under the upper bound."""
    methods = [
        Method("as trained", np.array([8.0, 1.0, 0.5, 0.25]), np.array([0, 0, 4.5, 4.0])),
        Method("dropped", np.array([4.0, 0.5, 0.25, 0.0]), np.array([0, 4.5, 4.0, 3.0])),
    ]
    check(
        extended_bounds(methods, np.array([2, 3]), np.array([5.0, 6.0])),
        """
        panel 1,1 of 1x2
          x linear 'pair index, from the fastest on'
          y log 'turns within the length'
          line 'as trained' #000000 -: x 0 1 2 3; y 8 1 0.5 0.25
          line 'dropped' #0072b2 --: x 0 1 2; y 4 0.5 0.25
          line #707070 --: level at 1
        panel 1,2 of 1x2
          x linear 'pair index, from the fastest on'
          y linear 'angle φ and lower bounds (rad)'
          points 'large keys' #b0b0b0: x 2 3; y 5 6 as a picture
          line 'as trained' #000000 -: x 2 3; y 4.5 4
          line 'dropped' #0072b2 --: x 1 2; y 4.5 4
        legend
          'large keys' #b0b0b0
          'as trained' #000000 -
          'dropped' #0072b2 --
        """,
    )


def test_five_methods_differ_in_dashes_and_colours():
    """And have no points where no feature is large."""
    spectrum = np.array([2.0, 0.5])
    methods = [Method(str(number), spectrum, np.ones(2)) for number in range(5)]
    left, _ = extended_bounds(methods, np.array([]), np.array([])).axes
    looks = [line.split(":")[0] for line in described(left.figure).splitlines() if "line '" in line]
    assert looks[:5] == [
        "  line '0' #000000 -",
        "  line '1' #0072b2 --",
        "  line '2' #d55e00 ",
        "  line '3' #009e73 -.",
        "  line '4' #cc79a7 (5 1 1 1 1 1)",
    ]
